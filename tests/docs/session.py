"""A Python session of a reader: runs the files named on its input as doctests.

One line of input is one file; it answers with a line `ok` or `failed`, after what
doctest wrote. What one block has named, the next one knows.
"""

import doctest
import sys
from pathlib import Path

import django

django.setup()
names: dict[str, object] = {}
for line in sys.stdin:
    file = Path(line.strip())
    test = doctest.DocTestParser().get_doctest(file.read_text(), names, file.name, None, 0)
    runner = doctest.DocTestRunner(verbose=False)
    runner.run(test, clear_globs=False)
    names = test.globs
    print("failed" if runner.failures else "ok", flush=True)

"""A Python session of a reader: runs the files named on its input, `.pycon` ones as doctests.

One line of input is one file; it answers with a line `ok` or `failed`, after what
it has to say. What one block has named, the next one knows.
"""

import doctest
import sys
import traceback
from pathlib import Path

import django


def runs(file: Path, names: dict[str, object]) -> bool:
    """Run a file; tell whether it said and raised nothing that it should not."""
    if file.suffix == ".pycon":
        test = doctest.DocTestParser().get_doctest(file.read_text(), names, file.name, None, 0)
        runner = doctest.DocTestRunner(verbose=False)
        runner.run(test, clear_globs=False)
        names.update(test.globs)
        return not runner.failures
    try:
        exec(compile(file.read_text(), file, "exec"), names)
    except Exception:
        traceback.print_exc(file=sys.stdout)
        return False
    return True


django.setup()
names: dict[str, object] = {"__name__": "__main__"}
for line in sys.stdin:
    print("ok" if runs(Path(line.strip()), names) else "failed", flush=True)

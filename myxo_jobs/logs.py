"""What the log lines of myxo_jobs may hold: a log is read on terminals, line by line."""

from __future__ import annotations

import logging
import re
from textwrap import indent

from myxo_jobs.payloads import describe

# Control characters, which a terminal obeys; what turns the direction of a text or ends a
# line; and halves of pairs, which no stream can encode.
_ACTS = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
IN_A_LINE = re.compile(rf"[\t\n{_ACTS}]")
IN_A_TRACEBACK = re.compile(rf"[{_ACTS}]")


class PlainText(logging.Filter):
    """Shows as an escape what would act in a message or a traceback, and cuts a long traceback.

    Such text comes from whatever raised: often it is what a stranger has sent.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            message = record.getMessage()
        except Exception:  # the handler tells of it
            return True
        if IN_A_LINE.search(message):
            record.msg, record.args = IN_A_LINE.sub(_escape, message), ()
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not record.exc_text:
            trace = IN_A_TRACEBACK.sub(_escape, describe(error)[1].rstrip("\n"))
            # What a Formatter has made once it takes from here. Indented: no line of it passes
            # for another event.
            record.exc_text = indent(trace, "  ", lambda line: True)
        return True


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


plain_text = PlainText()

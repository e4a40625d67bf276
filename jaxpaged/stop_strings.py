"""Stop strings: where a text that grows piece by piece has to end."""

from collections.abc import Sequence


class StopStrings:
    """Looks for the stop strings of one request in its text. Of what may be the start of one, nothing is given out.

    A text ends with the stop string that is complete first; of several that are complete with the same character, it
    is the longest. So one that another begins with always wins over it. The work for a piece does not grow with the
    text.
    """

    def __init__(self, stop: Sequence[str], *, include_stop_str_in_output: bool) -> None:
        self._stop = stop
        self._include = include_stop_str_in_output
        self._held = ""  # the end of the text, in which a stop string may have begun
        self.found: str | None = None

    def add(self, piece: str) -> str:
        """The next piece of text -> the text that is certain now. After `found` there is no more."""
        if self.found is not None:
            return ""
        text = self._held + piece
        ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in self._stop if stop in text]
        if ends:
            end, _, self.found = min(ends)
            self._held = ""
            return text[:end] if self._include else text[: end - len(self.found)]
        keep = max((_longest_start(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back, if the text ended without a stop string."""
        held, self._held = self._held, ""
        return held


def _longest_start(text: str, stop: str) -> int:
    """How many characters at the end of the text are the start of the stop string."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)

"""The text of one request while it is generated: its tokens as text, up to a stop string."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerFast

from jaxpaged.sampling_params import SamplingParams
from jaxpaged.stop_strings import StopStrings
from jaxpaged.tokenizer import Detokenizer


class CompletionText:
    """Tokens in, final text out. `stopped_after`: how many tokens it took to find a stop string, if one was found."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, params: SamplingParams) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(params.stop or (), include_stop_str_in_output=params.include_stop_str_in_output)
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self.text = ""
        self.stopped_after: int | None = None

    def add(self, token_ids: Sequence[int], *, is_last: bool) -> str:
        """The next tokens -> the text that no later token changes. What follows a stop string has none."""
        before = len(self.text)
        for token_id in token_ids:
            self._num_tokens += 1
            self._take(self._detokenizer.add([token_id]))
        if is_last:
            self._take(self._detokenizer.finish())
            self.text += self._stops.finish()
        return self.text[before:]

    def _take(self, piece: str) -> None:
        if self._num_tokens < self._min_tokens:
            self.text += piece
            return
        self.text += self._stops.add(piece)
        if self._stops.found is not None and self.stopped_after is None:
            self.stopped_after = self._num_tokens

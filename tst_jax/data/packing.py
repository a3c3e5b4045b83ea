"""How documents lie in rows (rule 20).

`concat`: a store's stream is its tokens, separators between documents; rows and bags straddle them.
`document`: in the stream each document is padded to a multiple of `align` tokens, the bag size, so
that a bag is of one document; each place has the number of its document in the row, 0 for a pad.
A stage whose bag size divides `align` can read on in the same stream, so the switch loses nothing.
"""

import numpy as np

_BLOCK = 128  # documents between two entries of the index, which is kept in memory


class PaddedStream:
    """The stream of a split with each document padded to a multiple of `align`.

    Args:
      tokens: ids of the split, sliceable.
      documents: offsets of each shard's documents, from `Store.documents`.
      align: at least 1.
    """

    def __init__(self, tokens, documents: list[np.ndarray], align: int):
        self._tokens, self._documents, self._align = tokens, documents, align
        blocks = []  # (place, shard, first document, its token)
        token = place = 0
        for shard, offsets in enumerate(documents):
            padded = np.concatenate([[0], np.cumsum(_padded(np.diff(offsets), align))])
            first = np.arange(0, offsets.size - 1, _BLOCK)
            rows = np.stack([padded[first], np.full_like(first, shard), first, offsets[first]])
            blocks.append(rows + [[place], [0], [0], [token]])
            token, place = token + int(offsets[-1]), place + int(padded[-1])
        # Each a contiguous array, which is what searchsorted is fast on.
        self._places, *self._blocks = np.concatenate(blocks, axis=1)
        self._length = place

    def __len__(self) -> int:
        return self._length

    def read(self, place: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids, segments) of places [place, place + count), both int32 [count].

        Segments number the documents from 1 on in each slice; 0 is a pad, whose id is 0.
        """
        lengths, starts, token = self._documents_from(place, count)
        ids, segments = np.zeros((2, count), np.int32)
        end = place + count
        first = max(place - starts[0], 0)  # a row may begin inside a document, or in its pads
        token += min(first, lengths[0])
        # All tokens of the slice lie side by side; the last document may go on beyond it.
        size = sum(lengths) - min(first, lengths[0]) - max(starts[-1] + lengths[-1] - end, 0)
        found, taken = self._tokens[token : token + size], 0
        for number, (start, length) in enumerate(zip(starts, lengths), 1):
            low, high = max(start, place), min(start + length, end)
            if low < high:
                here = slice(low - place, high - place)
                ids[here] = found[taken : taken + high - low]
                segments[here] = number
                taken += high - low
        return ids, segments

    def _documents_from(self, place, count) -> tuple[list[int], list[int], int]:
        """(lengths, first places, the first one's token) of the documents in a slice."""
        number = int(self._places.searchsorted(place, side="right")) - 1
        last = int(self._places.searchsorted(place + count, side="left"))
        lengths = []
        for block in range(number, last):
            shard, document, _ = (int(column[block]) for column in self._blocks)
            offsets = self._documents[shard][document : document + _BLOCK + 1]
            lengths.append(offsets[1:] - offsets[:-1])
        lengths = np.concatenate(lengths) if len(lengths) > 1 else lengths[0]
        padded = _padded(lengths, self._align)
        ends = padded.cumsum() + self._places[number]
        begin, end = ends.searchsorted([place, place + count - 1], side="right").tolist()
        token = int(self._blocks[2][number] + lengths[:begin].sum())
        inside = slice(begin, end + 1)
        return lengths[inside].tolist(), (ends - padded)[inside].tolist(), token


def _padded(lengths, align):
    return -(-lengths // align) * align

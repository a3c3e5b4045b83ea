"""How documents lie in rows (rule 20).

`concat`: a store's stream is its tokens, separators between documents; rows and bags straddle them.
`document`: in the stream each document is padded to a multiple of `align` tokens, the bag size, so
that a bag is of one document; each place has the number of its document in the row, 0 for a pad.
A stage whose bag size divides `align` can read on in the same stream, so the switch loses nothing.
"""

import numpy as np

_BLOCK = 512  # documents between two entries of the index: memory is 1/512 of the offsets


class PaddedStream:
    """The stream of a split with each document padded to a multiple of `align`.

    Args:
      tokens: ids of the split, sliceable.
      documents: offsets of each shard's documents, from `Store.documents`.
      align: at least 1.
    """

    def __init__(self, tokens, documents: list[np.ndarray], align: int):
        self._tokens, self._documents, self._align = tokens, documents, align
        blocks = []  # (shard, first document, its token, its place)
        token = place = 0
        for shard, offsets in enumerate(documents):
            padded = np.concatenate([[0], np.cumsum(_padded(np.diff(offsets), align))])
            first = np.arange(0, offsets.size - 1, _BLOCK)
            rows = np.stack([np.full_like(first, shard), first, offsets[first], padded[first]], 1)
            blocks.append(rows + [0, 0, token, place])
            token, place = token + int(offsets[-1]), place + int(padded[-1])
        self._blocks = np.concatenate(blocks)
        self._length = place

    def __len__(self) -> int:
        return self._length

    def read(self, place: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids, segments) of places [place, place + count), both int32 [count].

        Segments number the documents from 1 on in each slice; 0 is a pad, whose id is 0.
        """
        number = int(np.searchsorted(self._blocks[:, 3], place, side="right")) - 1
        first = self._blocks[number]
        lengths, starts = [], first[3]
        for shard, document, _, start in self._blocks[number:]:
            if start >= place + count:
                break
            offsets = self._documents[shard][document : document + _BLOCK + 1]
            lengths.append(np.diff(offsets))
        lengths = np.concatenate(lengths)
        ends = starts + np.cumsum(_padded(lengths, self._align))
        starts = ends - _padded(lengths, self._align)
        tokens = first[2] + np.cumsum(lengths) - lengths  # at which each document begins
        inside = slice(*np.searchsorted(ends, [place, place + count - 1], side="right") + [0, 1])
        starts, lengths, tokens = starts[inside], lengths[inside], tokens[inside]
        # What of each document lies in the slice, as counts of its own tokens.
        low = np.maximum(place - starts, 0)
        high = np.clip(place + count - starts, 0, lengths)
        taken = np.maximum(high - low, 0)
        begin = int(tokens[0] + min(low[0], lengths[0]))
        found = self._tokens[begin : begin + int(taken.sum())]
        at = np.repeat(starts + low - place - (np.cumsum(taken) - taken), taken)
        at += np.arange(found.size)
        ids, segments = np.zeros((2, count), np.int32)
        ids[at] = found
        segments[at] = np.repeat(np.arange(1, taken.size + 1), taken)
        return ids, segments


def _padded(lengths, align):
    return -(-lengths // align) * align

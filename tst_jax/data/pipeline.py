"""Rows of tokens for each step, as a pure function of (seed, step) (rules 1 to 3).

No iterator state crosses the switch or a restart: which tokens row k of a stage holds is computed
from the plan of the stages, the seed and k. An epoch's rows are a permutation of the store's
blocks; where a stage ends inside an epoch, the next one goes on with the blocks that are left, cut
into its own shorter rows and shuffled among themselves.
"""

import dataclasses
import itertools

import grain
import numpy as np

from tst_jax.errors import UserError
from tst_jax.schedule import Stage


class DataError(UserError):
    """The store does not hold what the run wants to read."""


@dataclasses.dataclass(frozen=True)
class Segment:
    """Rows with one shuffle: whole blocks of a parent segment from `first` on, cut into `cut` rows.

    The root segment of an epoch has no parent: its row k starts at token k * stride.
    """

    rows: int
    stride: int  # tokens from the start of a row to the start of the next
    seed: int  # of the permutation; -1: in order
    parent: "Segment | None" = None
    first: int = 0  # of the parent's rows
    cut: int = 1

    def start(self, k: int) -> int:
        """The token at which row k begins."""
        if self.seed >= 0:
            k = grain.experimental.index_shuffle(
                k, max_index=self.rows - 1, seed=self.seed, rounds=4
            )
        if self.parent is None:
            return k * self.stride
        return self.parent.start(self.first + k // self.cut) + k % self.cut * self.stride


class RowPlan:
    """Where each row of each stage begins in a stream of `tokens` tokens.

    Args:
      stages: of the run; the strides of later ones divide those of earlier ones.
      tokens: length of the store's split.
      seed: of the order of the rows.
      shuffle: False keeps the order of the store.
    Raises:
      DataError: the split is shorter than one row.
    """

    def __init__(self, stages: list[Stage], tokens: int, seed: int, shuffle: bool = True):
        self.stages, self.tokens, self.seed, self.shuffle = stages, tokens, seed, shuffle
        for stage in stages:
            if tokens < stage.row_tokens:
                raise DataError(
                    f"the train split has {tokens} tokens and a {stage.phase} row needs "
                    f"{stage.row_tokens}; lower data.positions or tst.bag_size, or prepare more"
                )
        self._segments: list[list[Segment]] = []  # of each stage, in order
        current, used, epoch = None, 0, 0
        for number, stage in enumerate(stages):
            segments = []
            if current is not None and used < current.rows:
                cut = current.stride // stage.row_stride
                rows = (current.rows - used) * cut
                seed = self._seed(epoch - 1, number)
                segments.append(Segment(rows, stage.row_stride, seed, current, used, cut))
            needed = (stage.stop - stage.start) * stage.rows
            while sum(segment.rows for segment in segments) < needed:
                # One more bag after the last row's own bags: its target.
                rows = (tokens - (stage.row_tokens - stage.row_stride)) // stage.row_stride
                segments.append(Segment(rows, stage.row_stride, self._seed(epoch, number)))
                epoch += 1
            self._segments.append(segments)
            ends = list(itertools.accumulate(segment.rows for segment in segments))
            current = segments[-1]
            used = current.rows - (ends[-1] - needed)
        self.epochs = epoch  # begun by the whole run

    def _seed(self, epoch: int, stage: int) -> int:
        if not self.shuffle:
            return -1
        return int(np.random.SeedSequence((self.seed, epoch, stage)).generate_state(1)[0])

    def start(self, stage_index: int, k: int) -> int:
        """The token at which row k of a stage begins; k counts over all steps of the stage."""
        for segment in self._segments[stage_index]:
            if k < segment.rows:
                return segment.start(k)
            k -= segment.rows
        raise IndexError(f"row {k} lies after the end of stage {stage_index}")


class StageRows:
    """Random access to the rows of a stage that one process reads: `rows[j]` is int32 [T]."""

    def __init__(self, tokens, plan: RowPlan, stage_index: int, numbers):
        self._tokens, self._plan, self._index = tokens, plan, stage_index
        self._stage, self._numbers = plan.stages[stage_index], numbers

    def __len__(self):
        return (self._stage.stop - self._stage.start) * len(self._numbers)

    def __getitem__(self, j):
        step, row = divmod(j, len(self._numbers))
        k = step * self._stage.rows + int(self._numbers[row])
        start = self._plan.start(self._index, k)
        return np.asarray(self._tokens[start : start + self._stage.row_tokens], np.int32)


def batches(tokens, plan: RowPlan, stage_index: int, step: int, numbers=None):
    """Iterator of this process' part of each step's batch, int32 [K, T], from `step` on.

    Args:
      tokens: the split's ids [tokens], any integer dtype, memory-mapped or not.
      plan: of the whole run.
      stage_index: which stage; ends with it.
      step: of the run, inside the stage.
      numbers: the K rows of a batch to read, see `sharding.local_rows`; None: all of them.
    """
    stage = plan.stages[stage_index]
    numbers = np.arange(stage.rows) if numbers is None else numbers
    rows = StageRows(tokens, plan, stage_index, numbers)
    dataset = grain.MapDataset.source(rows).batch(len(numbers))[step - stage.start :]
    # Rows are slices of a memory map: buffers and threads (default: 500 and 16) would only cost.
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))


def eval_batches(tokens, rows: int, positions: int, limit: int, numbers=None):
    """Next-token rows spread evenly over a held-out split: a list of int32 [K, positions + 1].

    Whole batches of `rows` rows only, so that one compiled program serves; about `limit` tokens
    (0: all). Of each, the rows `numbers` are read (None: all).

    Raises:
      DataError: the split is shorter than one batch.
    """
    batch = rows * positions
    available = (len(tokens) - 1) // batch
    if not available:
        raise DataError(
            f"the heldout split has {len(tokens)} tokens and one evaluation batch needs "
            f"{batch + 1}; lower eval.rows or data.positions, or hold out more"
        )
    count = min(available, max(1, limit // batch)) if limit else available
    spacing = (len(tokens) - 1) // (count * rows)
    starts = np.arange(count * rows).reshape(count, rows, 1) * spacing
    if numbers is not None:
        starts = starts[:, numbers]
    return [np.asarray(tokens[part + np.arange(positions + 1)], np.int32) for part in starts]

"""Which rows each step reads, as arithmetic on (seed, step) alone (rules 1 to 3).

No iterator state crosses the switch or a restart: which place in which store row k of a stage
begins at is computed from the plan of the stages, the seed and k. An epoch's rows are a permutation
of a store's blocks; where a stage ends inside an epoch, the next one goes on with the blocks that
are left, cut into its own shorter rows and shuffled among themselves. In a mixture each store has
an order of its own, so that this holds for every one of them.

Rows are numbered through a *phase* here: neighbouring stages that differ in nothing but the number
of rows of a step. A batch size that changes therefore cuts the same sequence of rows elsewhere.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Callable

import grain
import numpy as np

from tst_jax.data.mixture import Mixture
from tst_jax.errors import UserError
from tst_jax.schedule import Stage

_OFFSETS = 1 << 20  # sets the seed of the rows' offsets apart from those of their order


class DataError(UserError):
    """The stores do not hold what the run wants to read."""


@dataclasses.dataclass(frozen=True)
class Segment:
    """Rows with one shuffle: whole blocks of a parent segment from `first` on, cut into `cut` rows.

    The root segment of an epoch has no parent: its row k starts at place k * stride.
    """

    rows: int
    stride: int  # places from the start of a row to the start of the next
    seed: int  # of the permutation; -1: in order
    epoch: int
    align: int  # of the stream that the places are in, see `packing`
    parent: "Segment | None" = None
    first: int = 0  # of the parent's rows
    cut: int = 1

    def start(self, k: int) -> int:
        """The place at which row k begins."""
        if self.seed >= 0:
            k = grain.experimental.index_shuffle(
                k, max_index=self.rows - 1, seed=self.seed, rounds=4
            )
        if self.parent is None:
            return k * self.stride
        return self.parent.start(self.first + k // self.cut) + k % self.cut * self.stride

    def read_before(self) -> float:
        """Share of the epoch that was read before row 0."""
        if self.parent is None:
            return 0.0
        rest = 1 - self.parent.read_before()
        return self.parent.read_before() + rest * self.first / self.parent.rows


class SourceOrder:
    """Where the rows of one store begin.

    Args:
      phases: one stage of each, as an example of its rows.
      rows: how many rows each phase takes of this store.
      length: align -> places in the store's stream.
      seed: of the order.
      shuffle: False keeps the order of the store.
      name: of the store, for messages.
      number: of the store; stores of equal length are not read in one and the same order.
    Raises:
      DataError: the store is shorter than one row.
    """

    def __init__(
        self,
        phases: list[Stage],
        rows: list[int],
        length: Callable[[int], int],
        seed: int,
        shuffle: bool = True,
        name: str = "the store",
        number: int = 0,
    ):
        self._entropy, self._shuffle, self._needed = (seed, number), shuffle, rows
        self._segments: list[list[Segment]] = []  # of each phase, in order
        self._ends: list[list[int]] = []  # rows up to the end of each
        current, used, epoch = None, 0, 0
        for number, (stage, needed) in enumerate(zip(phases, rows)):
            segments, rows_of_them = [], 0
            if current is not None and used < current.rows:
                cut = current.stride // stage.row_stride
                left = (current.rows - used) * cut
                seed = self._seed(current.epoch, number)
                where = current.epoch, current.align, current, used, cut
                segments.append(Segment(left, stage.row_stride, seed, *where))
                rows_of_them = left
            # One more bag after the last row's own bags: its target.
            places = length(stage.align)
            whole = (places - (stage.row_tokens - stage.row_stride)) // stage.row_stride
            while needed > rows_of_them:
                if whole < 1:
                    raise DataError(
                        f"the train split of {name} has {places} tokens and a {stage.phase} row "
                        f"needs {stage.row_tokens}; lower data.positions or tst.bag_size, or "
                        "prepare more"
                    )
                seed = self._seed(epoch, number)
                segments.append(Segment(whole, stage.row_stride, seed, epoch, stage.align))
                rows_of_them += whole
                epoch += 1
            self._segments.append(segments)
            self._ends.append(list(itertools.accumulate(segment.rows for segment in segments)))
            if segments:
                current = segments[-1]
                used = current.rows - (self._ends[-1][-1] - needed)

    def _seed(self, epoch: int, phase: int) -> int:
        if not self._shuffle:
            return -1
        seed, number = self._entropy
        source = np.random.SeedSequence((seed, epoch, phase), spawn_key=(number,) if number else ())
        return int(source.generate_state(1)[0])

    def place(self, phase: int, k: int) -> tuple[int, int]:
        """(place at which row k of a phase begins, align of the stream it is in)."""
        number = bisect.bisect_right(self._ends[phase], k)
        segment = self._segments[phase][number]
        return segment.start(k - (self._ends[phase][number] - segment.rows)), segment.align

    def epochs(self, phase: int, rows: int) -> float:
        """Epochs read once `rows` rows of a phase are: 1.0 is the whole store once."""
        if not rows:
            before = [phase for phase in range(phase) if self._ends[phase]]
            if not before:
                return 0.0
            return self.epochs(before[-1], self._needed[before[-1]])
        number = bisect.bisect_left(self._ends[phase], rows)
        segment = self._segments[phase][number]
        done = rows - (self._ends[phase][number] - segment.rows)
        before = segment.read_before()
        return segment.epoch + before + (1 - before) * done / segment.rows


class Order:
    """Which row of which store each step reads.

    Args:
      stages: of the run; the strides of later ones divide those of earlier ones.
      lengths: of each store, align -> places in its stream.
      weights: of the stores, see `Mixture`; None for a single one.
      seed, shuffle: see `SourceOrder`.
      names: of the stores.
      random_offset: moves each superposed row on by 0 .. s - 1 tokens, so that the bags of a row
        that is read again begin elsewhere. Neighbours then overlap by, or leave out, up to s - 1.
    """

    def __init__(
        self, stages, lengths, weights=None, seed=0, shuffle=True, names=None, random_offset=False
    ):
        self.stages, self.mixture = stages, Mixture(weights or ["1"])
        self._lengths, self._offset_seed = lengths, None
        if random_offset:
            self._offset_seed = int(np.random.SeedSequence((seed, _OFFSETS)).generate_state(1)[0])
        self.names = names or [f"store {i}" for i in range(len(lengths))]
        self._phase, self._before, examples, rows = [], [], [], []
        for stage in stages:
            shape = stage.row_tokens, stage.row_stride
            if not examples or shape != (examples[-1].row_tokens, examples[-1].row_stride):
                examples.append(stage)
                rows.append(0)
            self._phase.append(len(examples) - 1)
            self._before.append(rows[-1])
            rows[-1] += (stage.stop - stage.start) * stage.rows
        self._strides = [stage.row_stride for stage in examples]
        self._sources = []
        for i, (length, name) in enumerate(zip(lengths, self.names)):
            counts = [self.mixture.count(i, n) for n in rows]
            self._sources.append(SourceOrder(examples, counts, length, seed, shuffle, name, i))
        self._rows = rows

    def place(self, stage: int, k: int) -> tuple[int, int, int]:
        """(store, place, align) of row k of a stage; k counts over all steps of the stage."""
        phase = self._phase[stage]
        store, row = self.mixture.locate(self._before[stage] + k)
        place, align = self._sources[store].place(phase, row)
        if self._offset_seed is not None:
            room = self._lengths[store](align) - place - self.stages[stage].row_tokens
            place += min(room, self._offset(store, phase, row, self.stages[stage].bag_size))
        return store, place, align

    def _offset(self, store: int, phase: int, row: int, bag_size: int) -> int:
        # Of the row's number in its phase, so another one in each epoch.
        seed = (self._offset_seed + 31 * store + phase) % 2**32
        drawn = grain.experimental.index_shuffle(row, max_index=2**31 - 2, seed=seed, rounds=4)
        return drawn % bag_size

    def places(self, step: int) -> list[tuple[str, int]]:
        """(store's name, place at which it begins) of each row of the batch of step `step`, from 0
        on: what is needed to read the batch again."""
        stage = next(i for i, s in enumerate(self.stages) if s.start <= step < s.stop)
        now = self.stages[stage]
        first = (step - now.start) * now.rows
        found = [self.place(stage, first + row) for row in range(now.rows)]
        return [(self.names[store], place) for store, place, _ in found]

    def progress(self, step: int) -> list[tuple[float, int]]:
        """(epochs, places in its stream) that each store was read for once `step` steps are done.

        Places are tokens, pads of packed documents among them.
        """
        stage = next((i for i, s in enumerate(self.stages) if step <= s.stop), len(self.stages) - 1)
        phase, now = self._phase[stage], self.stages[stage]
        k = self._before[stage] + (step - now.start) * now.rows
        found = []
        for i, source in enumerate(self._sources):
            rows = [self.mixture.count(i, n) for n in (*self._rows[:phase], k)]
            places = sum(n * stride for n, stride in zip(rows, self._strides))
            found.append((source.epochs(phase, rows[-1]), places))
        return found

    def first_repeat(self, store: int) -> int | None:
        """The step that is the first to read anything of a store for a second time."""
        last = self.stages[-1].stop
        beyond = lambda step: self.progress(step)[store][0] > 1 + 1e-12
        found = bisect.bisect_left(range(last + 1), True, key=beyond)
        return None if found > last else found - 1

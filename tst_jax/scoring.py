"""What a run's model makes of token ids: log-probabilities of continuations, and how they go on.

Requests of any length become padded batches of a few shapes, one program for each: lengths are
rounded up, and the shorter rows are, the more of them a batch holds. Only the positions that
predict a continuation meet the output head, a chunk at a time, so that no [B, L, V] logits exist.

Beside the letters of `tst_jax/__init__.py`: C for the positions of a row that are asked about, K
for the answers that they are asked about.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from tst_jax import programs, sharding
from tst_jax.errors import UserError
from tst_jax.kernels import linear_cross_entropy
from tst_jax.models.transformer import Transformer

_SHORTEST = 32  # positions of a row, padded
_FEWEST = 16  # positions of a row that meet the head
_CHUNK = 1024  # positions of a device whose logits exist at a time
_UNDER_WAY = 2  # batches that the devices are given before one's results are read

Pair = tuple[Sequence[int], Sequence[int]]  # ids of a context and of its continuation


@dataclasses.dataclass
class _Row:
    """One pass through the model. Requests whose inputs are the same share it: options of one
    token after one question, each of which is another target of the last position."""

    inputs: np.ndarray  # int32
    count: int  # of the last positions, which are asked about
    answers: list[tuple[int, np.ndarray]]  # (number of the request, int32 [count])


class Scorer:
    """A model on its devices, and the programs that ask it.

    Args:
      model: the decoder, laid out over `mesh` as `sharding.param_shardings` says.
      mesh: rows of a batch lie over its batch axes.
      max_length: the most positions that the model reads; what is longer loses its beginning.
      batch_positions: about so many in a batch, over all devices.
    """

    def __init__(self, model: Transformer, mesh, max_length: int, batch_positions: int = 16384):
        self.max_length = max_length
        self._model, self._mesh, self._batch_positions = model, mesh, batch_positions
        self._parts = math.prod(mesh.shape[axis] for axis in sharding.RULES["batch"])
        options = programs.COMPILER_OPTIONS[sharding.platform(mesh)]
        asked = functools.partial(_asked, mesh=mesh, chunk=_CHUNK * self._parts)
        self._asked = jax.jit(asked, compiler_options=options)
        self._next = jax.jit(
            _next,
            static_argnames=("temperature", "top_k", "top_p"),
            donate_argnames="cache",
            compiler_options=options,
        )

    def score(
        self,
        pairs: Sequence[Pair],
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[tuple[float, bool]]:
        """(log-probability in nats, whether each token is the likeliest) of each continuation after
        its context, in the order of `pairs`.

        Args:
          pairs: neither part may be empty. Of a pair of more than max_length + 1 tokens the context
            loses its first ones.
          progress: called with pairs done, and pairs to do.
        Raises:
          UserError: a pair that cannot be asked about, before anything is computed.
        """
        rows = self._rows(pairs)
        batches = self._batches(rows)
        found, done, pending = [(0.0, False)] * len(pairs), 0, collections.deque()

        def collect():
            nonlocal done
            rows, results = pending.popleft()
            for row, logprobs_K, greedy_K in zip(rows, *jax.device_get(results)):
                for k, (number, _) in enumerate(row.answers):
                    found[number] = float(logprobs_K[k]), bool(greedy_K[k])
                done += len(row.answers)
            progress(done, len(pairs))

        place = sharding.batch_sharding(self._mesh)
        for shape, rows in batches:
            arrays = jax.device_put(_filled(rows, *shape), place)
            pending.append((rows, self._asked(self._model, *arrays)))
            if len(pending) > _UNDER_WAY:
                collect()
        while pending:
            collect()
        return found

    def _rows(self, pairs) -> list[_Row]:
        rows = {}
        for number, (context, continuation) in enumerate(pairs):
            count = len(continuation)
            if not count or not len(context):
                what = "continuation" if not count else "context"
                raise UserError(f"request {number} has a {what} of no tokens; change the task")
            if count > self.max_length:
                raise UserError(
                    f"request {number} has a continuation of {count} tokens and the model reads "
                    f"{self.max_length}; leave the task out, or train with more data.positions"
                )
            ids = np.asarray([*context, *continuation][-(self.max_length + 1) :], np.int32)
            row = _Row(ids[:-1], count, [])
            row = rows.setdefault((row.inputs.tobytes(), count), row)
            row.answers.append((number, ids[-count:]))
        return list(rows.values())

    def _batches(self, rows):
        """((B, L, C, K), rows) of each batch, the longest rows first: what does not fit into memory
        says so at once, and a guess of the time that is left is rather too long.

        Rows of a shape that would not fill a batch join the next larger one: a program takes longer
        to compile than some pads to compute.
        """
        groups = collections.defaultdict(list)
        for row in rows:
            length = rounded(len(row.inputs), self.max_length)
            asked = min(_power_of_four(row.count, _FEWEST), length)
            groups[length, asked, _power_of_four(len(row.answers))].append(row)
        found, left, shape = [], [], (0, 0, 0)
        for own, members in sorted(groups.items()):
            shape, left = tuple(map(max, shape, own)), left + members
            if len(left) >= self._rows_of(shape[0]):
                found.append((shape, left))
                left, shape = [], (0, 0, 0)
        if left:
            found.append((shape, left))
        for shape, members in reversed(found):
            wanted = -(-len(members) // self._parts)
            size = min(self._rows_of(shape[0]), self._parts * (1 << (wanted - 1).bit_length()))
            for i in range(0, len(members), size):
                yield (size, *shape), members[i : i + size]

    def _rows_of(self, length: int) -> int:
        """Of a full batch of rows of `length` positions; they divide over the devices."""
        return self._parts * max(1, self._batch_positions // (length * self._parts))

    def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        stop: Callable[[list[int]], bool] = lambda new: False,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> list[int]:
        """New ids after the prompt, as `tst_jax.generate.sample` gives them, until `stop` says so.

        The prompt goes into the cache in parts whose lengths are powers of two, and the cache is
        rounded up, so that prompts of all lengths share some programs. One text at a time.

        Args:
          prompt: at least one id; with the new ones at most max_length.
          max_tokens: at most so many new ones.
          stop: whether the new ids so far are enough; they are returned with the last one.
          temperature: 0 takes the likeliest token each time.
          top_k: draw among the k likeliest only; 0: among all.
          top_p: draw among the likeliest that together have this probability.
          seed: of the draws.
        """
        cache = self._model.empty_cache(1, rounded(len(prompt) + max_tokens))
        fed, at, new, key = list(prompt), 0, [], jax.random.key(seed)
        how = dict(temperature=temperature, top_k=top_k, top_p=top_p)
        while len(new) < max_tokens and not (new and stop(new)):
            draw = jax.random.fold_in(key, len(new))
            while fed:
                size = 1 << (len(fed).bit_length() - 1)
                tokens_1xL = np.asarray([fed[:size]], np.int32)
                token, cache = self._next(self._model, tokens_1xL, cache, at, draw, **how)
                fed, at = fed[size:], at + size
            new.append(int(token))
            fed = new[-1:]
        return new


def rounded(length: int, most: int | None = None) -> int:
    """The padded length of a row: 32, 48, 64, 96, 128, ..., at most `most`."""
    power = 1 << (max(length, 1) - 1).bit_length()
    size = power * 3 // 4 if power * 3 // 4 >= max(length, _SHORTEST) else max(power, _SHORTEST)
    return size if most is None else min(size, most)


def _power_of_four(count: int, least: int = 1) -> int:
    while least < count:
        least *= 4
    return least


def _filled(rows, size, length, asked, answers):
    """The arguments of `_asked` for a batch of rows; the others are asked about nothing."""
    tokens_BxL = np.zeros((size, length), np.int32)
    targets_BxCxK = np.zeros((size, asked, answers), np.int32)
    first_B, count_B = np.zeros((2, size), np.int32)
    for b, row in enumerate(rows):
        tokens_BxL[b, : len(row.inputs)] = row.inputs
        first_B[b], count_B[b] = len(row.inputs) - row.count, row.count
        for k, (_, ids) in enumerate(row.answers):
            targets_BxCxK[b, : row.count, k] = ids
    return tokens_BxL, targets_BxCxK, first_B, count_B


def _asked(model, tokens_BxL, targets_BxCxK, first_B, count_B, *, mesh, chunk):
    """Log-probabilities of the targets, summed over a row's positions, and whether all are greedy.

    Pads stand behind a row, where a causal model does not look.

    Args:
      tokens_BxL: int32, what positions read.
      targets_BxCxK: int32, K answers: of positions first, first + 1, ... of their row.
      first_B, count_B: int32; only `count` positions count.
    Returns:
      (float32 [B, K] in nats, bool [B, K]).
    """
    kernels = sharding.kernels_on(mesh, "auto")
    hidden_BxLxD = model.body(model.embed(tokens_BxL[..., None], kernels=kernels), mesh=mesh)
    rows, asked, answers = targets_BxCxK.shape
    offset = jnp.arange(asked)
    at_BxC = jnp.minimum(first_B[:, None] + offset, tokens_BxL.shape[1] - 1)
    hidden_BxCxD = jnp.take_along_axis(hidden_BxLxD, at_BxC[..., None], axis=1)
    head_VxD = model.head.astype(hidden_BxCxD.dtype)

    def one(arrays):
        hidden_NxD, targets_NxK = arrays
        z_NxV = linear_cross_entropy.logits(hidden_NxD, head_VxD)
        picked_NxK = jnp.take_along_axis(z_NxV, targets_NxK, axis=1)
        logprobs_NxK = picked_NxK - jax.nn.logsumexp(z_NxV, axis=-1, keepdims=True)
        return logprobs_NxK, z_NxV.argmax(-1)[:, None] == targets_NxK

    parts = linear_cross_entropy.split((hidden_BxCxD, targets_BxCxK), chunk)
    logprobs, greedy = (
        jnp.moveaxis(x.reshape(x.shape[0], rows, -1, answers), 0, 1).reshape(rows, -1, answers)
        for x in jax.lax.map(one, parts)
    )
    counts_BxCx1 = (offset < count_B[:, None])[..., None]
    logprobs_BxK = jnp.where(counts_BxCx1, logprobs[:, :asked], 0).sum(1)
    return logprobs_BxK, (greedy[:, :asked] | ~counts_BxCx1).all(1)


def _next(model, tokens_1xL, cache, at, key, *, temperature, top_k, top_p):
    """The token after `tokens_1xL`, which stand at positions `at ..`, and the grown cache."""
    hidden, cache = model.body(model.embed(tokens_1xL[..., None]), cache, at)
    logits_V = model.logits(hidden[:, -1:])[0, 0]
    if temperature == 0:
        return jnp.argmax(logits_V), cache
    logits_V = logits_V / temperature
    if top_k:
        kept = jax.lax.top_k(logits_V, min(top_k, logits_V.size))[0][-1]
        logits_V = jnp.where(logits_V < kept, -jnp.inf, logits_V)
    if top_p < 1:
        falling_V = jnp.sort(jax.nn.softmax(logits_V), descending=True)
        # The last one that is needed to reach top_p; the likeliest is always kept.
        needed = (jnp.cumsum(falling_V) - falling_V < top_p).sum()
        least = falling_V[jnp.maximum(needed, 1) - 1]
        logits_V = jnp.where(jax.nn.softmax(logits_V) < least, -jnp.inf, logits_V)
    return jax.random.categorical(key, logits_V), cache

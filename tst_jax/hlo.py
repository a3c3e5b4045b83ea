"""What a compiled program sends between devices, read from its text (HLO)."""

import dataclasses
import re

KINDS = (
    *("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
)
_ITEM_BITS = {"pred": 8, "token": 0, "opaque": 0}
_OPERATION = re.compile(r"^\s*(?:ROOT )?(%?[\w.\-]+) = (.*?) ([a-z][\w\-]*)\(([^)]*)\)(.*)$")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_ARRAY = re.compile(r"\b([a-z]+)(\d*)(\w*)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BODY = re.compile(r"body=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


@dataclasses.dataclass
class _Line:
    name: str
    shape: str  # of the result
    operation: str
    operands: list[str]
    rest: str  # attributes


def collectives(text: str) -> dict[str, int]:
    """{kind: bytes} of all collectives that one device takes part in while the program runs once.

    Bytes are those of the larger of what goes in and what comes out of a collective on a device,
    times the trip counts of the loops around it. An all-reduce moves about twice that over a ring,
    the others about once. Kinds are KINDS, without those that do not occur.

    Args:
      text: of a compiled program, `compiled.as_text()`.
    Raises:
      ValueError: a loop around a collective whose trip count cannot be read.
    """
    computations, entry = _parse(text)

    def total(name) -> dict[str, int]:
        """Of a computation that runs once."""
        found, loops = _inside(name, computations)
        sizes = {}
        for kind, size in found.values():
            sizes[kind] = sizes.get(kind, 0) + size
        for loop, owner in loops:
            inner = total(_BODY.search(loop.rest)[1])
            trips = _trips(loop, owner, computations) if inner else 0
            for kind, size in inner.items():
                sizes[kind] = sizes.get(kind, 0) + size * trips
        return sizes

    return dict(sorted(total(entry).items()))


def _inside(name, computations):
    """What a computation and all that it calls hold, loops left closed.

    Returns:
      {place: (kind, bytes)}, and [(loop, computation in which it stands)].
    """
    found, loops = {}, []
    for line in computations.get(name, {}).values():
        if line.operation == "while":
            loops.append((line, name))
            continue
        if own := _own(line, computations[name], name):
            found[name, line.name] = own
        for called in _called(line):
            inner, more = _inside(called, computations)
            if line.operation == "fusion":
                # A TPU program writes one collective in several fusions, each a part of the work.
                inner = {(_channel(*place, computations), own): own for place, own in inner.items()}
            found |= inner
            loops += more
    return found, loops


def _parse(text):
    computations, entry, current = {}, None, None
    for raw in text.splitlines():
        raw = re.sub(r"/\*.*?\*/", "", raw)
        if header := _HEADER.match(raw):
            current = computations[header[2]] = {}
            entry = header[2] if header[1] else entry
        elif raw == "}":
            current = None
        elif current is not None and (found := _OPERATION.match(raw)):
            name, shape, operation, operands, rest = found.groups()
            operands = re.findall(r"%?([\w.\-]+)(?:,|$)", operands)
            current[name.lstrip("%")] = _Line(name.lstrip("%"), shape, operation, operands, rest)
            if operation in ("constant", "parameter"):  # their value stands where operands do
                current[name.lstrip("%")].operands = [found[4]]
    return computations, entry


def _channel(computation, name, computations):
    found = re.search(r"channel_id=(\d+)", computations[computation][name].rest)
    return found[1] if found else (computation, name)


def _called(line):
    names = _CALLED.findall(line.rest)
    for branches in _BRANCHES.findall(line.rest):
        names += [name.strip().lstrip("%") for name in branches.split(",")]
    return names


def _own(line, lines, computation) -> tuple[str, int] | None:
    """(kind, bytes) of a line that is a collective."""
    kind = line.operation.removesuffix("-start")
    if kind not in KINDS:
        return None
    given = sum(_bytes(lines[name].shape) for name in line.operands if name in lines)
    result = _bytes(line.shape)
    if line.operation.endswith("-start") and result > given:
        result -= given  # a started operation's result has its operands in it
    if kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"  # how TPU programs write one
    return kind, max(given, result)


def _bytes(shape: str) -> int:
    total = 0
    for kind, bits, _, sizes in _ARRAY.findall(shape):
        items = 1
        for size in filter(None, sizes.split(",")):
            items *= int(size)
        total += items * (int(bits) if bits else _ITEM_BITS[kind]) // 8
    return total


def _trips(loop, computation, computations) -> int:
    if found := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.rest):
        return int(found[1])
    condition = computations[re.search(r"condition=%?([\w.\-]+)", loop.rest)[1]]
    limits = [
        int(line.operands[0])
        for line in condition.values()
        if line.operation == "constant" and re.match(r"[su]\d+\[\]", line.shape)
    ]
    counters = [line for line in condition.values() if line.operation == "get-tuple-element"]
    if len(limits) == 1 and len(counters) == 1:
        index = int(re.search(r"index=(\d+)", counters[0].rest)[1])
        lines = computations[computation]
        first = lines[lines[loop.operands[0]].operands[index]]
        while first.operation == "copy":
            first = lines[first.operands[0]]
        if first.operation == "constant":
            return limits[0] - int(first.operands[0])
    raise ValueError(f"the trip count of {loop.name} in {computation} cannot be read")

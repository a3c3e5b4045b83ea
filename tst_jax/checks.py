"""What a setting may be, as lines for the user: name, value, what is allowed, and a near name."""

import difflib

# Of a float32; what lies beyond is inf on the devices, what lies below `TINY` is 0.
HUGE = 3.4e38
TINY = 1.2e-38


def show(value) -> str:
    """`repr` in one line of at most 100 characters."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"  # Python prints no longer ones
    try:
        text = " ".join(repr(value).split())
    except Exception:  # of a class that is not ours
        text = f"a {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:80]} ... {text[-15:]}"


def near(name: str, known) -> str:
    """The one of `known` that `name` was meant to be: the same last part, or spelled nearly so.

    Returns "" if there is none.
    """
    name, known = str(name), list(known)
    last = name.rpartition(".")[2]
    ends = [other for other in known if other.rpartition(".")[2] == last]
    found = ends or difflib.get_close_matches(name, known, 1)
    if not found:  # "bagsize" for "tst.bag_size"
        lasts = {other.rpartition(".")[2]: other for other in reversed(known)}
        found = [lasts[part] for part in difflib.get_close_matches(last, lasts, 1, 0.7)]
    return found[0] if found else ""


def did_you_mean(name: str, known, otherwise: str = "", before: str = "") -> str:
    """`; did you mean X?` with `before` in front of X, or `otherwise`."""
    found = near(name, known)
    return f"; did you mean {before}{found}?" if found else otherwise


def choice(name: str, value, allowed) -> list[str]:
    """A line if the string `value` is none of `allowed`."""
    if value in allowed:
        return []
    hint = did_you_mean(value.lower(), allowed)
    return [f"{name} is {show(value)}; choose one of {', '.join(allowed)}{hint}"]


def whole(name: str, value: int, least: int, most: int | None = None) -> list[str]:
    """A line if an integer lies outside `least .. most`."""
    if value >= least and (most is None or value <= most):
        return []
    wanted = f"be at least {least}" if most is None else f"lie in {least} .. {most}"
    return [f"{name} is {show(value)}; it must {wanted}"]


def real(name: str, value, most: float | None = None, above: bool = False, hint="") -> list[str]:
    """A line if a number is below 0, above `most`, or not finite as a float32.

    Args:
      most: the largest that is allowed; None: any finite one.
      above: 0 is not allowed either.
      hint: behind the line.
    """
    # NaN compares false with everything.
    if (TINY if above else 0) <= value <= (HUGE if most is None else most):
        return []
    wanted = f"lie in 0 .. {most:g}" if most is not None else "be finite and at least 0"
    if above:
        wanted = "be finite and above 0" if most is None else f"lie above 0, up to {most:g}"
    return [f"{name} is {show(value)}; it must {wanted}{hint}"]

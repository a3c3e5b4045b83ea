"""What a run does about its own numbers: losses that are not finite, and losses that jump."""

import dataclasses

POLICIES = ("stop", "skip")


@dataclasses.dataclass
class NumbersConfig:
    """A loss or gradient that is not finite changes no parameter; then the run stops or goes on."""

    nonfinite: str = "stop"  # stop; skip: the batch is left out, up to `skips` times
    skips: int = 10  # of the whole run
    spike: float = 6.0  # warn of a loss so many deviations above the last ones; 0: never

    def problems(self) -> list[str]:
        """One line for each setting that cannot work."""
        found = []
        if self.nonfinite not in POLICIES:
            allowed = ", ".join(POLICIES)
            found.append(f"numbers.nonfinite is {self.nonfinite!r}; choose one of {allowed}")
        if self.skips < 0:
            found.append(f"numbers.skips is {self.skips}; it must be at least 0")
        if not 0 <= self.spike < float("inf"):
            found.append(f"numbers.spike is {self.spike}; give a number of deviations, or 0")
        return found

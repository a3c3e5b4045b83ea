"""Which store each row of a mixture comes from."""

import fractions
import math

import numpy as np

LONGEST_CYCLE = 1_000_000


class Mixture:
    """Row numbers -> stores, in exact proportions: a cycle of rows repeated for ever.

    In each cycle a store with weight p / q gets p of q rows, spread evenly.

    Args:
      weights: as text, so that 0.29 is 29/100; they need not sum to 1.
    Raises:
      ValueError: no positive numbers, or a cycle longer than a million rows.
    """

    def __init__(self, weights: list[str]):
        try:
            exact = [fractions.Fraction(weight) for weight in weights]
        except (ValueError, ZeroDivisionError):
            raise ValueError(f"{', '.join(weights)} are no numbers; write 0.29,0.71") from None
        if min(exact) <= 0:
            raise ValueError(f"{', '.join(weights)}; each must be above 0")
        shares = [weight / sum(exact) for weight in exact]
        self.cycle = math.lcm(*(share.denominator for share in shares))
        if self.cycle > LONGEST_CYCLE:
            raise ValueError(
                f"{', '.join(weights)} repeat only after {self.cycle} rows; round them, so that "
                f"they do after {LONGEST_CYCLE}"
            )
        self.shares = [float(share) for share in shares]
        self._rows = [int(share * self.cycle) for share in shares]  # of each store in a cycle
        places = np.concatenate([(np.arange(n) + 0.5) / n for n in self._rows])
        owners = np.repeat(np.arange(len(shares)), self._rows)
        owners = owners[np.lexsort((owners, places))]
        self._owners = owners.tolist()
        before = np.zeros((len(shares), self.cycle + 1), np.int64)
        for store in range(len(shares)):
            before[store, 1:] = np.cumsum(owners == store)
        self._before = before

    def locate(self, k: int) -> tuple[int, int]:
        """(store, which of its rows row k is)."""
        if self.cycle == 1:
            return 0, k
        cycles, at = divmod(k, self.cycle)
        store = self._owners[at]
        return store, cycles * self._rows[store] + int(self._before[store, at])

    def count(self, store: int, k: int) -> int:
        """How many of the first k rows are of a store."""
        cycles, at = divmod(k, self.cycle)
        return cycles * self._rows[store] + int(self._before[store, at])

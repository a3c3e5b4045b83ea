"""What a run is told about its data. Needs none of the packages that read it."""

import dataclasses
import re

from tst_jax import checks
from tst_jax.data.mixture import Mixture

PACKING = ("concat", "document")  # see packing.py
VERIFY = ("all", "shared", "sizes")  # see store.open_store

MOST_PREFETCH = 1_000  # batches in host memory
_WEIGHT = re.compile(r"\d{0,18}\.?\d{0,18}([eE]-?\d)?|\d{1,18}/\d{1,18}")


@dataclasses.dataclass
class DataConfig:
    """What a step reads."""

    store: str = ""  # folder made by `python -m tst_jax.prepare`; several with commas are a mixture
    weights: str = ""  # of a mixture: shares of the rows that each store gives, "0.29,0.71"
    max_epochs: float = 0.0  # refuses a run that reads a store more often; 0: only warns
    packing: str = "concat"  # concat: rows straddle documents; document: each by itself (rule 20)
    rows: int = 8  # B: rows of a recovery step, over all devices
    rows_from: str = ""  # other batch sizes from later steps on: "STEP:ROWS,STEP:ROWS"
    positions: int = 64  # L: positions of a row, in either phase
    shuffle: bool = True  # rows in an order drawn from the seed; False: in the store's order
    verify: str = "all"  # at start: all, shared (each process a part), sizes (see open_store)
    prefetch: int = 2  # batches that are read and put on the devices ahead of the step

    def stores(self) -> list[str]:
        """The folders."""
        return [path.strip() for path in self.store.split(",")]

    def shares(self) -> list[str] | None:
        """Weights of the stores, None for a single one."""
        return [w.strip() for w in self.weights.split(",")] if self.weights else None

    def problems(self) -> list[str]:
        """One line for each setting that cannot work."""
        found = checks.whole("data.rows", self.rows, 1)
        found += checks.whole("data.positions", self.positions, 1)
        found += checks.whole("data.prefetch", self.prefetch, 0, MOST_PREFETCH)
        found += checks.real("data.max_epochs", self.max_epochs, hint=" (0: any number)")
        found += checks.choice("data.packing", self.packing, PACKING)
        found += checks.choice("data.verify", self.verify, VERIFY)
        if not all(self.stores()):
            found.append(
                f"data.store is {self.store!r}; give the folder that tst_jax.prepare made, or "
                "several with commas"
            )
        shares = self.shares() or ["1"]
        wrong = [share for share in shares if not _WEIGHT.fullmatch(share)]
        stores, weights = len(self.stores()), len(shares)
        if stores != weights:
            found.append(
                f"data.store names {stores} and data.weights {weights}; give each store its weight"
            )
        elif wrong:
            found.append(
                f"data.weights is {checks.show(self.weights)}; {checks.show(wrong[0])} is no "
                "number above 0: write 0.29,0.71"
            )
        elif self.weights:
            try:
                Mixture(self.shares())
            except ValueError as error:
                found.append(f"data.weights: {error}")
        return found

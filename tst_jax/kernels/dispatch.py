"""Which implementation of a hot operation runs, and how its arrays lie on a mesh."""

import dataclasses
import os

import jax
from jax.sharding import Mesh, PartitionSpec

CHOICES = ("auto", "xla", "pallas", "interpret")

# (operation, device kind) of the cards on which `auto` takes the Pallas path. An entry needs a row
# of measurements in README.md beside this file that shows it more than 10 percent ahead of XLA.
WINS: frozenset[tuple[str, str]] = frozenset()

# What the GPU kernels are made for, and the cards: the first word of `device_kind` after NVIDIA.
GPU_ARCHS = {
    "hopper": ("H100", "H200", "H20", "H800", "GH200"),
    "blackwell": ("B100", "B200", "B300", "GB200", "GB300"),
}


@dataclasses.dataclass(frozen=True)
class Kernels:
    """How `embed_bags` and `bag_loss` run. The default suits one device and automatic sharding.

    With a mesh, the operation is wrapped in `shard_map`: its arrays have to lie (or are brought) as
    the axes below say, every device works on its part, and the collectives are exactly those that
    the two modules of this folder name. Pallas kernels on several devices need it: XLA cannot
    partition them.
    """

    choice: str = "auto"  # one of CHOICES
    mesh: Mesh | None = None
    batch: tuple[str, ...] = ()  # mesh axes that share the rows of the batch
    vocab: tuple[str, ...] = ()  # that share the vocabulary of table and head
    width: tuple[str, ...] = ()  # that share their width (FSDP): gathered for use; also in batch

    def __post_init__(self):
        if self.choice not in CHOICES:
            raise ValueError(f"kernels is {self.choice!r}; choose one of {', '.join(CHOICES)}")
        if not set(self.width) <= set(self.batch):
            raise ValueError(f"width lies over {self.width}, which must be among {self.batch}")
        if set(self.vocab) & set(self.batch):
            raise ValueError(f"vocab {self.vocab} and batch {self.batch} share an axis; part them")

    @property
    def rows(self) -> PartitionSpec:
        """Of arrays whose first dimension is the batch's."""
        return PartitionSpec(self.batch or None)

    @property
    def table(self) -> PartitionSpec:
        """Of table and head [V, D]."""
        return PartitionSpec(self.vocab or None, self.width or None)

    def shard(self, function, in_specs, out_specs):
        """`function` of one device's parts as a function of whole arrays."""
        if self.mesh is None:
            return function
        # Gradients are written out beside the values, so nothing is derived through shard_map.
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def device_kind(self) -> str:
        """Of the device that the program is made for, as far as tracing can tell."""
        if self.mesh is not None:
            return self.mesh.devices.flat[0].device_kind
        described = jax.sharding.get_abstract_mesh().abstract_device
        return described.device_kind if described else jax.devices()[0].device_kind


def gpu_arch(device_kind: str) -> str | None:
    """`hopper`, `blackwell`, or None for a device that the GPU kernels are not made for."""
    name = device_kind.removeprefix("NVIDIA ").split(" ")[0]
    return next((arch for arch, names in GPU_ARCHS.items() if name in names), None)


def run(operation: str, kernels: Kernels, tpu, cuda, xla, *args, as_measured: bool):
    """Calls the path of the platform that the program is lowered for.

    Args:
      operation: its name in WINS.
      tpu: Pallas path, a function of `args` that takes `interpret` too.
      cuda: the same for a GPU: a function of the architecture that returns a path.
      xla: function of `args` for any platform.
      as_measured: whether `args` have the dtypes that WINS speaks of.
    Returns:
      What the chosen path returns. With the choice `pallas`, lowering for a platform without a
      path is an error, never a fallback.
    """
    if kernels.choice == "interpret":
        return tpu(*args, interpret=True)
    # Asked last, because it starts jax's devices.
    wins = lambda: WINS and as_measured and (operation, kernels.device_kind()) in WINS
    if kernels.choice == "xla" or (kernels.choice == "auto" and not wins()):
        return xla(*args)
    arch = gpu_arch(kernels.device_kind())
    paths = {"tpu": tpu} | ({"cuda": cuda(arch)} if arch else {})
    paths |= {"default": xla} if kernels.choice == "auto" else {}
    return jax.lax.platform_dependent(*args, **paths)


def problem(choice: str, devices, dtype: str) -> str | None:
    """One line if `choice` cannot run on these devices, before anything is compiled."""
    device = devices[0]
    if choice == "interpret":
        # Every device's interpreter waits for the others in a thread of XLA's pool.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        if device.platform == "cpu" and len(devices) > cores:
            return (
                f"kernels=interpret with {len(devices)} CPU devices needs as many cores, and there "
                f"are {cores}; use fewer devices, or kernels=xla"
            )
    if choice != "pallas" or device.platform == "tpu":
        return None
    if device.platform != "gpu" or gpu_arch(device.device_kind) is None:
        known = ", ".join(name for names in GPU_ARCHS.values() for name in names)
        return (
            f"kernels=pallas has kernels for TPUs and {known}, not for {device.device_kind}; "
            "give kernels=auto, xla, or interpret to run the TPU kernels slowly anywhere"
        )
    if dtype != "bfloat16":
        return (
            f"kernels=pallas on {device.device_kind} multiplies bfloat16, not {dtype}; "
            "give model.dtype=bfloat16, or kernels=auto"
        )
    return None

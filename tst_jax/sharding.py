"""One mesh, and one table from the logical names of array axes to its axes."""

import dataclasses
import math

import jax
import numpy as np
from flax import nnx
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tst_jax.kernels.dispatch import Kernels

AXES = ("data", "fsdp", "tensor", "expert")
RULES = {
    "batch": ("data", "fsdp", "expert"),
    "position": None,
    "width": None,  # of activations, and of what is too small to lie in parts: scales and biases
    "embed": "fsdp",  # the same width, of tables and matrices
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
    "experts": "expert",
    "choices": None,  # of the router, which every device computes for all experts
}


@dataclasses.dataclass
class MeshConfig:
    """Devices along each axis; one may be -1, which takes what the others leave."""

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    expert: int = 1

    def problems(self) -> list[str]:
        """One line for each size that no number of devices could have."""
        sizes = dataclasses.asdict(self)
        found = [
            f"mesh.{name} is {size}; give a number of devices (1 or more), or -1 for the rest"
            for name, size in sizes.items()
            if size < 1 and size != -1
        ]
        rest = [f"mesh.{name}" for name, size in sizes.items() if size == -1]
        if len(rest) > 1:
            found.append(
                f"{' and '.join(rest)} are -1; only one axis of the mesh can take the rest"
            )
        return found


def mesh_shape(cfg: MeshConfig, count: int) -> tuple[int, ...]:
    """Sizes of AXES for `count` devices. ValueError in one line if they do not fill the mesh."""
    sizes = [getattr(cfg, axis) for axis in AXES]
    fixed = math.prod(size for size in sizes if size != -1)
    sizes = tuple(count // fixed if size == -1 else size for size in sizes)
    if math.prod(sizes) != count:
        shape = ", ".join(f"{axis}={getattr(cfg, axis)}" for axis in AXES)
        raise ValueError(f"{count} devices do not fill a mesh of {shape}; change mesh.*")
    return sizes


def make_mesh(cfg: MeshConfig, devices=None) -> Mesh:
    """The mesh over all devices, neighbours in it being neighbours in the machine where they can.

    Several TPU slices lie along `data`, which asks least of the network between them.

    Raises:
      ValueError: the devices do not fill it, in one line.
    """
    devices = jax.devices() if devices is None else devices
    shape = mesh_shape(cfg, len(devices))
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if slices == 1:
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    else:
        if shape[0] % slices:
            raise ValueError(
                f"mesh.data={shape[0]} does not divide by the {slices} slices that lie along it; "
                "change mesh.data"
            )
        inside = (shape[0] // slices, *shape[1:])
        grid = mesh_utils.create_hybrid_device_mesh(
            inside, (slices, 1, 1, 1), devices, allow_split_physical_axes=True
        )
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows of a batch over the devices."""
    return NamedSharding(mesh, spec("batch"))


def local_rows(mesh: Mesh, rows: int) -> np.ndarray:
    """Which of a batch's `rows` rows the devices of this process hold, in rising order."""
    places = batch_sharding(mesh).addressable_devices_indices_map((rows,)).values()
    return np.unique(np.concatenate([np.arange(rows)[place] for place in places]))


def assemble(mesh: Mesh, numbers: np.ndarray, rows_KxT: np.ndarray, rows: int):
    """A batch [rows, T] on the mesh, of which this process gives the rows `numbers`."""

    def part(index):
        start, stop, _ = index[0].indices(rows)
        first = np.searchsorted(numbers, start)
        return rows_KxT[first : first + stop - start]

    shape = (rows, *rows_KxT.shape[1:])
    return jax.make_array_from_callback(shape, batch_sharding(mesh), part)


def axes(mesh: Mesh | None, name: str) -> tuple[str, ...]:
    """The mesh axes of more than one device that the logical axis `name` lies over."""
    return tuple(axis for axis in _over(name) if mesh is not None and mesh.shape[axis] > 1)


def platform(mesh: Mesh | None) -> str:
    """cpu, gpu or tpu: what a program on the mesh is for; without one, jax's default."""
    return jax.default_backend() if mesh is None else mesh.devices.flat[0].platform


def kernels_on(mesh: Mesh | None, choice: str) -> Kernels:
    """The kernels of `choice` for tables and batches that lie on the mesh as RULES says."""
    if mesh is None:
        return Kernels(choice)
    on = [axes(mesh, name) for name in ("batch", "vocab", "embed")]
    return Kernels(choice, mesh, *on)


def spec(*names: str | None) -> PartitionSpec:
    """Where an array with these logical axes lies; None is an axis that has no name.

    Raises:
      ValueError: an unknown name, or two names that claim one axis of the mesh.
    """
    taken = {}
    for name in names:
        if name is not None and name not in RULES:
            raise ValueError(
                f"no rule for the axis {name!r}; sharding.RULES has {', '.join(RULES)}"
            )
        for axis in _over(name):
            if axis in taken:
                raise ValueError(
                    f"axes {taken[axis]!r} and {name!r} of one array both lie over mesh.{axis}; "
                    "name one of them otherwise, or change sharding.RULES"
                )
            taken[axis] = name
    return PartitionSpec(*(RULES[name] if name else None for name in names))


def _over(name: str | None) -> tuple[str, ...]:
    rule = RULES[name] if name else None
    return (rule,) if isinstance(rule, str) else rule or ()


def constrain(array, mesh: Mesh | None, *names: str | None, gathered: bool = False):
    """The array, which a program then lays over the mesh as its logical axes say.

    `gathered` makes it whole over the axes that share the batch: a weight that is to be used.
    """
    if mesh is None:
        return array
    place = spec(*names)
    if gathered:
        place = PartitionSpec(*(None if a in RULES["batch"] else a for a in place))
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, place))


def param_shardings(params, mesh: Mesh):
    """A tree like `params` (arrays or shapes) of shardings, after each param's `axes`.

    Raises:
      ValueError: an axis does not divide over the mesh, or two collide, with the param's name.
    """

    def one(path, param, array):
        # Layers are stacked along a leading axis without a name.
        names = (None,) * (array.ndim - len(param.axes)) + tuple(param.axes)
        whose = jax.tree_util.keystr(path, simple=True, separator=".")
        try:
            place = spec(*names)
        except ValueError as error:
            raise ValueError(f"{whose}: {error}") from None
        for size, name in zip(array.shape, names):
            over = _over(name)
            if size % (devices := math.prod(mesh.shape[axis] for axis in over)):
                raise ValueError(
                    f"{whose}: its {name} axis of {size} does not divide by "
                    f"mesh.{' x mesh.'.join(over)}={devices}; change either"
                )
        return NamedSharding(mesh, place)

    inside = lambda path, param: jax.tree.map(lambda array: one(path, param, array), param)
    is_param = lambda x: isinstance(x, nnx.Param)
    return jax.tree_util.tree_map_with_path(inside, params, is_leaf=is_param)


def optimizer_shardings(opt_state, params, mesh: Mesh):
    """Shardings for an optimizer state: what mirrors a param lies where the param lies.

    Without them a jitted `optimizer.init` would put whole moments on every device. A leaf mirrors a
    param if its path ends in the param's and its shape is the param's: moments do, also where an
    optimizer keeps them for some params only (muon); factored or scalar statistics do not.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    places = jax.tree.leaves(param_shardings(params, mesh))
    by_path = {path: (x.shape, place) for (path, x), place in zip(leaves, places, strict=True)}

    def one(path, leaf):
        for start in range(len(path)):
            shape, place = by_path.get(path[start:], (None, None))
            if shape == leaf.shape:
                return place
        return replicated(mesh)

    return jax.tree_util.tree_map_with_path(one, opt_state)

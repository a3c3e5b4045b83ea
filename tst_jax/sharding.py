"""One mesh, and one table from the logical names of array axes to its axes."""

import dataclasses
import math

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tst_jax.kernels.dispatch import Kernels

AXES = ("data", "fsdp", "tensor", "expert")
RULES = {
    "batch": ("data", "fsdp", "expert"),
    "vocab": "tensor",
    "position": None,
    "embed": "fsdp",
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
            f"mesh.{name} is {size}; give a number of devices, or -1 for the rest"
            for name, size in sizes.items()
            if size < 1 and size != -1
        ]
        if list(sizes.values()).count(-1) > 1:
            found.append("mesh has more than one -1; only one axis can take the rest")
        return found


def make_mesh(cfg: MeshConfig, devices=None) -> Mesh:
    """The mesh over all devices. ValueError in one line if they do not fill it."""
    devices = jax.devices() if devices is None else devices
    sizes = [getattr(cfg, axis) for axis in AXES]
    fixed = math.prod(size for size in sizes if size != -1)
    sizes = [len(devices) // fixed if size == -1 else size for size in sizes]
    if math.prod(sizes) != len(devices):
        shape = ", ".join(f"{axis}={getattr(cfg, axis)}" for axis in AXES)
        raise ValueError(f"{len(devices)} devices do not fill a mesh of {shape}; change mesh.*")
    return Mesh(np.asarray(devices).reshape(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows of a batch over the devices."""
    return NamedSharding(mesh, PartitionSpec(RULES["batch"]))


def axes(mesh: Mesh | None, name: str) -> tuple[str, ...]:
    """The mesh axes of more than one device that the logical axis `name` lies over."""
    rule = RULES[name] or ()
    names = (rule,) if isinstance(rule, str) else rule
    return tuple(axis for axis in names if mesh is not None and mesh.shape[axis] > 1)


def platform(mesh: Mesh | None) -> str:
    """cpu, gpu or tpu: what a program on the mesh is for; without one, jax's default."""
    return jax.default_backend() if mesh is None else mesh.devices.flat[0].platform


def kernels_on(mesh: Mesh | None, choice: str) -> Kernels:
    """The kernels of `choice` for tables and batches that lie on the mesh as RULES says."""
    if mesh is None:
        return Kernels(choice)
    on = [axes(mesh, name) for name in ("batch", "vocab", "embed")]
    return Kernels(choice, mesh, *on)


def param_shardings(params, mesh: Mesh):
    """A tree like `params` (arrays or shapes) of shardings, after each param's `axes`.

    Raises:
      ValueError: an axis does not divide over the mesh, with the param's name.
    """

    def one(path, param, array):
        # Layers are stacked along a leading axis without a name.
        names = (None,) * (array.ndim - len(param.axes)) + tuple(param.axes)
        spec = [RULES[name] if name else None for name in names]
        for size, name, axis in zip(array.shape, names, spec):
            if axis and size % mesh.shape[axis]:
                raise ValueError(
                    f"{jax.tree_util.keystr(path, simple=True, separator='.')}: its {name} axis of "
                    f"{size} does not divide by mesh.{axis}={mesh.shape[axis]}; change either"
                )
        return NamedSharding(mesh, PartitionSpec(*spec))

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

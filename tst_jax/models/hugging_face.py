"""Decoders in Hugging Face's folders, to and from: config.json and safetensors.

What corresponds to what is in `hugging_face_map.py`. Nothing here needs torch or transformers, and
no pickle is read. Arrays go by their names in a `Transformer` ("layers.query", of all layers
together) and pass through memory one at a time.
"""

import json
import math
import os
import pathlib
import re
import shutil
import struct
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from tst_jax.errors import UserError
from tst_jax.models.hugging_face_map import (
    architecture,
    array_rows,
    differences,
    hf_config,
    tensor_shapes,
)
from tst_jax.models.shapes import ModelConfig

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"float32": "F32", "bfloat16": "BF16"}  # of an export
_READABLE = ("F32", "F16", "BF16")  # float32 holds each of them exactly

# Buffers that old versions of transformers saved among the weights.
_BUFFERS = re.compile(r"rotary_emb\.inv_freq$|\bh\.\d+\.attn\.(masked_)?bias$")


# --- Writing -------------------------------------------------------------------------------------


def write_model(
    folder,
    cfg: ModelConfig,
    get: Callable[[str], np.ndarray],
    *,
    max_positions: int,
    separator_id: int | None,
    dtype: str = "float32",
    files: dict[str, str | bytes] | None = None,
    max_shard_bytes: int = 5 * 10**9,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Writes config.json, generation_config.json and safetensors that transformers loads.

    Args:
      folder: to make; it may exist if it is empty. It appears whole, by one rename.
      cfg: of a shape that `architecture` knows.
      get: name of an array -> that array, float32, all layers of it; called once for each.
      max_positions, separator_id: see `hf_config`.
      dtype: of the weights, one of DTYPES; bfloat16 rounds.
      files: name -> content of further files, the tokenizer's for example.
      max_shard_bytes: above this the weights are split into several files and an index.
      progress: called with bytes written and to be written.
    Raises:
      UserError: a shape without an architecture, a folder that is in use, a full disk.
    """
    config = hf_config(cfg, max_positions, separator_id, dtype)
    generation = {"bos_token_id": separator_id, "eos_token_id": separator_id}
    rows, stored = array_rows(cfg), jnp.dtype(dtype)
    shards, size, total = [{}], 0, 0  # of each: name -> shape, in the order of writing
    for name, shape in tensor_shapes(cfg).items():
        count = math.prod(shape) * stored.itemsize
        if size + count > max_shard_bytes and shards[-1]:
            shards, size = [*shards, {}], 0
        shards[-1][name] = shape
        size, total = size + count, total + count

    folder = pathlib.Path(folder).absolute()
    if os.path.lexists(folder) and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"{folder} exists and is no empty folder; give another one")
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free
    if free < total + 2**26:  # the rest is small, and a disk is better not filled to its end
        raise UserError(f"{folder} needs {total:,} bytes, and {free:,} are free on its disk")
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of an export that was killed
    partial.mkdir()
    try:
        texts = {"config.json": config, "generation_config.json": generation}
        count = len(shards)
        names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
        if count == 1:
            names = [SINGLE]
        else:
            weight_map = {name: file for file, shard in zip(names, shards) for name in shard}
            texts[INDEX] = {"metadata": {"total_size": total}, "weight_map": weight_map}
        texts = {name: json.dumps(value, indent=2) + "\n" for name, value in texts.items()}
        for name, content in (texts | (files or {})).items():
            data = content if isinstance(content, bytes) else content.encode()
            (partial / name).write_bytes(data)
        tensors, done = _tensors(cfg, rows, get), 0
        for name, shard in zip(names, shards):
            with open(partial / name, "wb") as file:
                file.write(_header(shard, dtype))
                for _ in shard:
                    # No variable, which would keep this array while the next one is read.
                    done += file.write(np.ascontiguousarray(next(tensors), stored).view(np.uint8))
                    progress(done, total)
        os.rename(partial, folder)  # replaces an empty folder, fails on one filled meanwhile
    except BaseException:  # also Ctrl-C: half a model is of no use to anyone
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _tensors(cfg, rows, get):
    for row in rows:
        arrays = [get(name) for name in row.ours.split()]
        if any(x.shape != (*row.lead(cfg), *row.shape) for x in arrays):
            raise ValueError(f"{row.ours}: {arrays[0].shape}, wanted {row.lead(cfg)} {row.shape}")
        for index in np.ndindex(row.lead(cfg)):
            yield row.to_theirs([x[index] for x in arrays])
        del arrays  # before the next ones are read


def _header(shard, dtype) -> bytes:
    """What a safetensors file begins with. The library's own writer wants all tensors in memory at
    once; the format is a length, JSON padded to eight bytes, and the tensors one after the other.
    """
    header, start = {"__metadata__": {"format": "pt"}}, 0  # transformers asks for the format
    for name, shape in shard.items():
        stop = start + math.prod(shape) * jnp.dtype(dtype).itemsize
        header[name] = dict(dtype=DTYPES[dtype], shape=list(shape), data_offsets=[start, stop])
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


# --- Reading -------------------------------------------------------------------------------------


def read_params(folder, cfg: ModelConfig) -> Callable[[str], np.ndarray]:
    """A function from the name of an array to that array, float32, read when it is asked for.

    Args:
      folder: with model.safetensors, or an index and its shards, of float32, float16 or bfloat16.
      cfg: the decoder that it holds, from `model_config` for example.
    Raises:
      UserError: before anything is read, with a line for each tensor that is missing, unexpected
        or of another shape or dtype.
    """
    get, problems = _open(pathlib.Path(folder), cfg)
    if problems:
        raise UserError("\n".join(problems))
    return get


def _open(folder, cfg):
    """`read_params`' function, and the problems."""
    rows, found, problems = array_rows(cfg), {}, []
    prefix = "transformer." if architecture(cfg) == "GPT2LMHeadModel" else ""
    for file in _files(folder):
        try:
            tensors = safe_open(folder / file, framework="np")
        except (OSError, SafetensorError) as error:
            raise UserError(f"{folder / file} cannot be read ({error})") from None
        for name in tensors.keys():
            # GPT-2's own checkpoints are of the model without a head, whose names are shorter.
            whole = name if name.startswith((prefix, "lm_head.")) else prefix + name
            found[whole] = (tensors, name)
    wanted = tensor_shapes(cfg)
    problems += [f"{folder}: {name} is missing" for name in wanted if name not in found]
    for name, (tensors, theirs) in found.items():
        tensor = tensors.get_slice(theirs)
        shape, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
        if name in wanted and shape != wanted[name]:
            problems.append(f"{folder}: {name} is {list(shape)}, wanted {list(wanted[name])}")
        elif name in wanted and dtype not in _READABLE:
            problems.append(f"{folder}: {name} is {dtype}; {', '.join(_READABLE)} are read")
        elif name == "lm_head.weight" and cfg.tied and rows[0].theirs in found:
            table, named = found[rows[0].theirs]
            if not np.array_equal(table.get_tensor(named), tensors.get_tensor(theirs)):
                problems.append(f"{folder}: {name} is not the embedding, though they are tied")
        elif name not in wanted and not _BUFFERS.search(name):
            problems.append(f"{folder}: {name} is unexpected")

    def get(name: str) -> np.ndarray:
        row = next(row for row in rows if name in row.ours.split())
        position, lead = row.ours.split().index(name), row.lead(cfg)
        array = np.empty((*lead, *row.shape), np.float32)
        for index in np.ndindex(lead):
            tensors, theirs = found[row.theirs.format(*index)]
            array[index] = row.to_ours(tensors.get_tensor(theirs))[position]
        return array

    return get, problems


def _files(folder) -> list[str]:
    if (folder / SINGLE).is_file():
        return [SINGLE]
    if (folder / INDEX).is_file():
        return sorted(set(_read_json(folder / INDEX).get("weight_map", {}).values()))
    hint = "give the folder of a model that save_pretrained wrote"
    if list(folder.glob("*.bin")):
        hint = "pytorch_model.bin is a pickle, which can run code, and is not read: convert it"
    raise UserError(f"{folder} has neither {SINGLE} nor {INDEX}; {hint}")


def load_into(shapes, shardings, folder, cfg: ModelConfig):
    """The parameters in `folder`, on devices.

    Args:
      shapes: a `Transformer` of arrays or `jax.ShapeDtypeStruct`s.
      shardings: the same tree of shardings.
      folder, cfg: see `read_params`, also for what is raised.
    Returns:
      The same tree of arrays.
    """
    get = read_params(folder, cfg)
    leaves, structure = jax.tree_util.tree_flatten_with_path(shapes)
    arrays = []
    for (path, leaf), place in zip(leaves, jax.tree.leaves(shardings), strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        value = get(name).astype(leaf.dtype, copy=False)
        if value.shape != leaf.shape:
            raise ValueError(f"{name} is {leaf.shape} in the tree and {value.shape} in {folder}")
        put = lambda index, value=value: value[index]
        arrays.append(jax.make_array_from_callback(leaf.shape, place, put))
    return jax.tree.unflatten(structure, arrays)


def check_import(folder, cfg: ModelConfig, tokenizer_vocab: dict | None = None) -> list[str]:
    """One line for each reason why `folder` cannot be the beginning of a run; cheap.

    Args:
      folder: of a model, as `save_pretrained` writes it.
      cfg: the run's decoder.
      tokenizer_vocab: token -> id of the run's tokenizer; compared with tokenizer.json if it is
        there.
    """
    folder = pathlib.Path(folder)
    if not folder.is_dir():
        return [f"{folder} does not exist; give the folder of a Hugging Face model"]
    try:
        problems = differences(_read_json(folder / "config.json"), cfg, folder)
        problems = problems or _open(folder, cfg)[1]
        if tokenizer_vocab is not None and (folder / "tokenizer.json").is_file():
            problems += _other_token(folder / "tokenizer.json", tokenizer_vocab)
    except UserError as error:
        return str(error).splitlines()
    return problems


def _read_json(path) -> dict:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error})") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} is no JSON object")
    return found


def _other_token(path, vocab: dict) -> list[str]:
    """The first token in which a tokenizer.json differs from `vocab` (token -> id)."""
    found = _read_json(path)
    theirs = found["model"]["vocab"]
    if isinstance(theirs, list):  # a Unigram model: [token, score], the id is the place
        theirs = {token: i for i, (token, _) in enumerate(theirs)}
    theirs = theirs | {token["content"]: token["id"] for token in found.get("added_tokens", [])}
    both = sorted(theirs.keys() | vocab.keys(), key=lambda t: (theirs.get(t, vocab.get(t)), t))
    for token in both:
        if theirs.get(token) != vocab.get(token):
            return [
                f"{path} gives the token {token!r} the id {theirs.get(token)}, the store's "
                f"tokenizer {vocab.get(token)}; prepare the store with --tokenizer={path}"
            ]
    return []

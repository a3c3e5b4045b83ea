"""Proves `tst_jax.hlo`: what a compiled program sends, counted from its text.

By hand on small texts in the manners of the compilers for CPU and TPU, and on compiled programs
with eight fake devices, whose bytes follow from the shapes.
"""

import json
import math

import jax
import jax.numpy as jnp
import pytest
from eight_devices import report_of
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tst_jax import hlo

D = 8  # devices
ROWS, WIDTH, LAYERS = 64, 32, 5

# Cut down from what compilers print; sizes changed to be told apart.
TPU = """
HloModule jit_f, is_scheduled=true

%region_0.1 (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

%fused_start (p: bf16[4,8]) -> (bf16[4,8], bf16[16,8]) {
  %p = bf16[4,8]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %all-gather.1 = bf16[16,8]{1,0:T(8,128)(2,1)S(1)} all-gather(%p), channel_id=7
}

%fused_done (p: bf16[4,8]) -> bf16[16,8] {
  %p = bf16[4,8]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %all-gather.2 = bf16[16,8]{1,0:T(8,128)(2,1)S(1)} all-gather(%p), channel_id=7
}

%all-reduce-scatter.3 (p: f32[40,2]) -> f32[10,2] {
  %p = f32[40,2]{1,0} parameter(0)
  %all-reduce.5 = f32[40,2]{1,0} all-reduce(%p), channel_id=8, to_apply=%region_0.1
  ROOT %slice = f32[10,2]{1,0} slice(%all-reduce.5), slice={[0:10], [0:2]}
}

%body.2 (arg: (s32[], bf16[4,8], f32[40,2])) -> (s32[], bf16[4,8], f32[40,2]) {
  %arg = (s32[]{:T(128)}, bf16[4,8]{1,0}, f32[40,2]{1,0}) parameter(0)
  %x = bf16[4,8]{1,0} get-tuple-element(%arg), index=1
  %y = f32[40,2]{1,0} get-tuple-element(%arg), index=2
  %start = (bf16[4,8]{1,0}, bf16[16,8]{1,0}) fusion(%x), kind=kCustom, calls=%fused_start
  %kernel = bf16[4,8]{1,0} custom-call(%x), backend_config="{
}}, not the end of a computation"
  %done = bf16[16,8]{1,0} fusion(%x), kind=kCustom, calls=%fused_done
  %scattered = f32[10,2]{1,0} fusion(%y), kind=kCustom, calls=%all-reduce-scatter.3
  ROOT %out = (s32[], bf16[4,8], f32[40,2]) tuple(%arg, %x, %y)
}

%condition.2 (arg: (s32[], bf16[4,8], f32[40,2])) -> pred[] {
  %arg = (s32[]{:T(128)}, bf16[4,8]{1,0}, f32[40,2]{1,0}) parameter(0)
  %limit = s32[]{:T(128)} constant(30)
  %i = s32[]{:T(128)} get-tuple-element(%arg), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %limit), direction=LT
}

ENTRY %main (x: bf16[4,8], y: f32[40,2]) -> f32[] {
  %x = bf16[4,8]{1,0} parameter(0)
  %y = f32[40,2]{1,0} parameter(1)
  %zero = s32[]{:T(128)} constant(FIRST)
  %copy.1 = s32[]{:T(128)} copy(%zero), backend_config={"flag_configs":[]}
  %init = (s32[], bf16[4,8], /*index=2*/f32[40,2]) tuple(%copy.1, %x, /*index=2*/%y)
  %while.1 = (s32[], bf16[4,8], f32[40,2]) while(%init), condition=%condition.2, body=%body.2
  %permute = (f32[3,5]{1,0}, f32[3,5]{1,0}, u32[]{:S(2)}, u32[]) collective-permute-start(%z)
  %two = (f32[7]{0:T(128)}, f32[2,3]{1,0}) all-reduce(%a, %b), channel_id=1, to_apply=%region_0.1
  ROOT %again = f32[7]{0} all-reduce(%a), channel_id=1, to_apply=%region_0.1
}
"""


def test_text_of_a_tpu_program():
    """Loops, started collectives, one in two fusions, an all-reduce that is a reduce-scatter."""
    found = hlo.collectives(TPU.replace("FIRST", "0"))
    assert found == {
        "all-gather": 30 * 16 * 8 * 2,
        "all-reduce": 4 * (7 + 6) + 4 * 7,
        "collective-permute": 2 * 4 * 15 + 8,
        "reduce-scatter": 30 * 40 * 2 * 4,
    }
    assert hlo.collectives(TPU.replace("FIRST", "29"))["all-gather"] == 16 * 8 * 2


def test_a_loop_whose_count_cannot_be_read_is_an_error():
    text = TPU.replace("%copy.1 = s32[]{:T(128)} copy(%zero)", "%copy.1 = s32[] add(%x, %y)")
    with pytest.raises(ValueError, match=r"trip count of while\.1 in main"):
        hlo.collectives(text)
    known = text.replace(
        "body=%body.2", 'body=%body.2, backend_config={"known_trip_count":{"n":"3"}}'
    )
    assert hlo.collectives(known)["all-gather"] == 3 * 16 * 8 * 2
    # Where nothing is sent inside, it does not matter.
    assert hlo.collectives("ENTRY %main (x: f32[]) -> f32[] {\n  %x = f32[] parameter(0)\n}") == {}


def main():
    mesh = Mesh(jax.devices(), ("d",))
    place = lambda *spec: NamedSharding(mesh, PartitionSpec(*spec))

    def layers(x, weights):
        def layer(x, w):
            w = jax.lax.with_sharding_constraint(w, place())
            return jnp.tanh(x @ w), None

        return jax.lax.scan(layer, x, weights)[0]

    def loss(weights, x):
        return (layers(x, weights) ** 2).sum()

    shapes = [
        jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32),
        jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32),
    ]
    whole = dict(in_shardings=(place(), place("d")), out_shardings=place())
    parts = dict(in_shardings=(place(None, "d"), place("d")), out_shardings=place())
    programs = {
        "gradients": jax.jit(jax.grad(loss), **whole),
        "gathered": jax.jit(loss, **parts),
    }
    report = {
        name: hlo.collectives(program.lower(*shapes).compile().as_text())
        for name, program in programs.items()
    }
    print(json.dumps(report))


def test_compiled_programs():
    report = report_of(__file__)
    weights = 4 * math.prod((LAYERS, WIDTH, WIDTH))
    assert report["gradients"] == {"all-reduce": weights}
    assert report["gathered"] == {"all-gather": weights, "all-reduce": 4}


if __name__ == "__main__":
    main()

"""--config.debug_nans: from the last checkpoint on to the first step that is not finite, and there
that step once more, with checks. Writes nothing and takes no lock.
"""

import contextlib

from tst_jax import debug_nans, hosts, programs
from tst_jax.checkpoint import Checkpoints
from tst_jax.loop import Run, initial_state, is_switch


def find(run: Run, check_record, preemption, say) -> None:
    """Says what `debug_nans.replay` found, or that all steps are finite.

    Args:
      run: checked.
      check_record: called with the checkpoints and the step to go on from.
      preemption: as in training.
      say: called with each line.
    """
    config, folder, step = run.config, run.workdir / "checkpoints", 0
    if folder.is_dir():
        checkpoints = Checkpoints(folder, read_only=True, say=say)
        step = checkpoints.good(preemption.watch) or 0
    where = run.mesh, run.shapes, run.shardings
    if step:
        hosts.together(lambda: check_record(checkpoints, step))
    say(f"looking for the first step after {step} that is not finite; nothing is written")
    compiled = preemption.watch(
        lambda: programs.compile_run(config, run.stages, *where, step, config.last, say)
    )
    if step:
        state = checkpoints.restore(step, run.shapes, run.shardings)
    else:
        state = initial_state(run, compiled, say)
    for index, stage in enumerate(run.stages):
        if stage.stop <= step or stage.start >= config.last:
            continue
        if step == stage.start > 0 and is_switch(run.stages[index - 1], stage):
            state = compiled.switch(state)
        with contextlib.closing(run.batches(index, step)) as batches:
            while step < min(stage.stop, config.last):
                preemption.check()
                batch = next(batches)
                after, metrics = compiled.steps[index](state, *batch)
                step += 1
                if not metrics["finite"]:
                    say(f"step {step}, {stage.phase} s={stage.bag_size}, is not finite:")
                    for line in debug_nans.replay(config, stage, state, batch, run.mesh):
                        say(f"  {line}")
                    return
                state = after
    say(f"all steps up to {step} are finite")

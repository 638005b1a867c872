"""`megatron.training.pretrain`, protected: its training loop and what comes after, by hooks at run time.

`train()` is entered again from its top after a recovery, on every role alike, one iteration back: the train
step there is answered from the snapshot, and so all that follows a step (log, evaluation, checkpoint, exit)
is done again where a failure may have interrupted it. Evaluations and checkpoints after training are parts
of their own (`Session.part`). What lies between is short, and its few collectives are recorded.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from ft_core.elastic.rules import Membership
from ft_core.worker import session
from ft_core.worker.session import Session
from ft_megatron import patched, replica_groups, saves
from ft_megatron.arguments import NOT_ASKED
from ft_megatron.data import Loaders
from ft_megatron.loop import Loop, PretrainAdapter, tell_beginning
from ft_megatron.optimizer_hooks import hook_optimizer
from ft_megatron.progress_log import ProgressLog
from ft_megatron.replica_groups import ReplicaGroups

log = logging.getLogger(__name__)
_SYNC_FUNCTIONS = ("no_sync_func", "grad_sync_func", "param_sync_func")


def install(training: ModuleType) -> None:
    """Patch `megatron.training.training`. Its functions do as they did until arguments say `--ft`."""
    hooks = Hooks(training)
    for patch in (*patched.LOOP, patched.LENGTHS):
        patch.wrap(functools.partial(functools.partial, getattr(hooks, patch.name)), of=training)
    patched.LOADERS.wrap(
        lambda build: hooks.loaders.wrap(build, hooks.enabled, replica_groups.dealt), of=training
    )
    patched.STRAGGLERS.wrap(functools.partial(functools.partial, hooks.report), of=training.stimer)
    # The loop takes it by this name, after the hooks that depend on the optimizer are known.
    patched.FINALIZE.wrap(
        lambda finalize: lambda *args, **kwargs: hooks.finalize(finalize)(*args, **kwargs), of=training
    )


class Hooks:
    """The functions of `megatron.training.training` that take part, each given the original first."""

    def __init__(self, training: ModuleType) -> None:
        self._training = training
        self.loaders = Loaders()
        self.finalize: Callable[[Any], Any] = lambda finalize: finalize
        self._loop: Loop | None = None
        self._session: Session | None = None
        self._adapter: PretrainAdapter | None = None
        self._groups: ReplicaGroups | None = None
        self._log: ProgressLog | None = None
        self._answer: Any = None
        self._totals: dict[str, Any] | None = None
        self._entered = self._again = self._inside = False
        self._membership: Membership | None = None
        self._postponed: Callable[[], None] | None = None
        """The checkpoint that was due last, if it was not written since groups were away."""
        self._parts = 0
        self._saved_in = 0
        """The epoch of the newest checkpoint."""
        self._saving = False
        self._training_log = inspect.signature(training.training_log)
        self._train_step = inspect.signature(training.train_step)
        self._iteration_end = inspect.signature(training.checkpoint_and_decide_exit)
        self._operations = 0
        """Floating-point operations of the iterations before this one."""
        self._answered = False
        """Whether this iteration's step was done before."""

    def enabled(self) -> bool:
        """Whether the arguments say `--ft`."""
        return bool(getattr(self._training.get_args(), "ft", False))

    # -- before training -----------------------------------------------------------------------

    def load_checkpoint(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """A newcomer gets its state from memory: it neither reads nor waits, and takes no part. What it is
        told is from where the others went on."""
        current = session.current()
        if current is None or not self.enabled() or self._loop is not None:
            return original(*args, **kwargs)
        with current.loading():
            iteration, operations = (0, 0) if current.joining else original(*args, **kwargs)
        return tell_beginning(self._training, iteration, operations, told=current.joining)

    # -- training ------------------------------------------------------------------------------

    def train(self, original: Any, forward_step_func: Any, model: Any, optimizer: Any, scheduler: Any,
              *args: Any, **kwargs: Any) -> Any:  # fmt: skip
        """Megatron's loop, as the first part that all roles make."""
        current = session.current()
        if not self.enabled():
            if current is not None:
                current.unprotected(NOT_ASKED)
            return original(forward_step_func, model, optimizer, scheduler, *args, **kwargs)
        assert current is not None, "checked with the arguments"
        self._session = current
        self._loop = loop = Loop(self._training, self.loaders, current.find_group)
        self._adapter = adapter = PretrainAdapter(model, optimizer, scheduler, loop)
        self._groups = groups = ReplicaGroups(self._training, current, adapter)
        self._log = ProgressLog(self._training, groups.printed, groups.is_last, current.tell_loss)
        groups.join(model, scheduler, self.loaders)
        self.finalize = hook_optimizer(optimizer, model, current, self._adapter.sharded)
        config = self._training.get_model_config(model[0])
        if config.finalize_model_grads_func is not None:
            config.finalize_model_grads_func = self.finalize(config.finalize_model_grads_func)
        syncs = {name: getattr(config, name) for name in _SYNC_FUNCTIONS}
        current.point("startup")
        current.rehearse(adapter, lambda: self._rehearse(forward_step_func, model, optimizer))
        arguments = self._training.get_args()
        version = 0 if current.joining else arguments.iteration
        current.begin(self._adapter, version, lambda: None, resumes=bool(arguments.save))

        def entered() -> Any:
            for name, function in syncs.items():
                setattr(config, name, function)
            self._enter()
            self._inside = True
            try:
                loop.returned = original(
                    self._stepping(forward_step_func), model, optimizer, scheduler, *args, **kwargs
                )
            except SystemExit:
                if self._postponed is not None:
                    if not groups.all_are_there:
                        groups.await_all()
                    self._postponed()
                raise
            finally:
                self._inside = False
            return loop.returned

        def passed() -> Any:
            arguments.iteration, arguments.num_floating_point_operations_so_far = loop.first
            arguments.curr_iteration = loop.iteration
            return loop.returned

        return self._part(entered, passed)

    def _rehearse(self, forward_step_func: Any, model: Any, optimizer: Any) -> None:
        """A micro batch, and the optimizer's step; an interleaved schedule needs as many as it has stages."""
        args, several = self._training.get_args(), len(model) > 1
        rerun = self._training.get_rerun_state_machine()
        rerun.set_mode(type(rerun.get_mode()).DISABLED)  # until the adapter's reset
        batch = next((itertools.repeat(loader.first_batch()) for loader in self.loaders.dealt), None)
        self._training.get_forward_backward_func()(
            forward_step_func=forward_step_func,
            data_iterator=[batch] * len(model) if several else batch,
            model=model,
            num_microbatches=args.pipeline_model_parallel_size if several else 1,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            decoder_seq_length=args.decoder_seq_length,
            forward_only=False,
        )
        optimizer.step()

    def _part(self, call: Callable[[], Any], passed: Callable[[], Any]) -> Any:
        """A part (see `Session.part`) that ends in a version of its own: with what it has counted and drawn.

        A checkpoint under way belongs to it, so that the last one is written again if a failure stops it.
        """
        loop, current = self._loop, self._session
        assert loop is not None and current is not None
        self._parts = number = self._parts + 1

        def made() -> Any:
            if loop.parts >= number:  # here and on all roles, and a failure came before all had left it
                return passed()
            found = call()
            self._training.maybe_finalize_async_save(blocking=True)
            loop.parts = number
            current.step_done()
            current.secure()
            return found

        return current.part(made, passed)

    def _enter(self) -> None:
        """Set what the loop reads at its top, so that it begins with the iteration that was done last."""
        assert self._loop is not None and self._adapter is not None and self._session is not None
        assert self._groups is not None
        loop, args = self._loop, self._training.get_args()
        args.iteration, args.num_floating_point_operations_so_far = loop.iteration, loop.operations
        self._operations = loop.operations
        assert self._log is not None
        self._log.doubtful = 2 * self._session.every
        self.loaders.keep = self._log.doubtful
        membership, before = self._session.groups.membership, self._membership
        self._membership = membership
        changed = before != membership
        if before is None:  # a newcomer
            changed = bool(membership.changes) and membership.changes[-1][0] == self._session.version
        if changed:
            self._log.undo(loop.iteration + (loop.result is not None))  # other groups take part from here on
        self._groups.restart()
        self._answer = loop.result
        loop.enter()
        self._again, self._entered = self._entered or loop.result is not None, True
        self._totals = dict(loop.totals) if self._again else None
        if self._session.epoch == 1 and loop.result is None:
            return  # not `_again`, which may differ between roles: what follows is a collective
        self._training.update_num_microbatches(args.consumed_train_samples, consistency_check=False)

    def train_step(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """A step of the loop; the first one after a recovery was done before."""
        loop, current = self._loop, self._session
        if loop is None or current is None or self._groups is None:
            return original(*args, **kwargs)
        arguments = self._training.get_args()
        if self._answer is not None:
            answer, self._answer, self._answered = self._answer, None, True
            loop.answer()
            arguments.iteration, arguments.num_floating_point_operations_so_far = loop.first
            self._training.get_rerun_state_machine().current_iteration += 1  # as the step itself has done
            return answer
        assert self._log is not None
        self._answered = False
        self._log.doubtful, self._postponed = self._log.doubtful - 1, None
        current.check_epoch()
        found = self._train_step.bind(*args, **kwargs)
        schedule = self._groups.exchange.schedule(found.arguments["forward_backward_func"])
        found.arguments["forward_backward_func"] = schedule
        result = original(*found.args, **found.kwargs)
        should_exit, loop.lengths = result[3], None
        if should_exit:
            return result  # the rerun state machine wants to leave before the optimizer steps
        self._groups.count_missing()
        loop.result, loop.iteration = result, arguments.curr_iteration
        loop.operations = self._operations
        if patched.LENGTHS.exists():
            loop.lengths = self._training.consume_seqlen_stats_in_iteration()
        current.step_done(self._groups.step_done())
        return result

    def consume_seqlen_stats_in_iteration(self, original: Any) -> Any:
        """Found at the end of the step, on all ranks: who has not done the step has none to bring later."""
        lengths = self._loop.lengths if self._loop is not None else None
        return original() if lengths is None else lengths

    def report(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Who slows the others down: not where there was no step to measure, which would be divided by."""
        if not self._answered:
            return original(*args, **kwargs)
        detector = self._training.stimer
        detector.reset()
        detector._check_toggle()
        return False

    def checkpoint_and_decide_exit(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """The end of an iteration: it is told how many operations there were, its own included."""
        found = self._iteration_end.bind(*args, **kwargs)
        self._operations = found.arguments["num_floating_point_operations_so_far"]
        return original(*args, **kwargs)

    def training_log(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """One line for each iteration, whoever writes it and however often it is come to."""
        loop, current = self._loop, self._session
        if loop is None or current is None or self._log is None:
            return original(*args, **kwargs)
        found = self._training_log.bind(*args, **kwargs)
        iteration, totals = found.arguments["iteration"], found.arguments["total_loss_dict"]
        if self._totals is not None:
            totals.clear()
            totals.update(self._totals)
            self._totals = None
            found.arguments["is_first_iteration"] = iteration == loop.first[0] + 1
            found.arguments["report_memory_flag"] &= iteration <= loop.first[0] + 2
        with self._log.once(f" iteration {iteration:8d}/"):
            report_memory = original(*found.args, **found.kwargs)
        loop.totals = dict(totals)
        current.point("between")
        return report_memory

    def evaluate_and_print_results(self, original: Any, prefix: str, forward_step_func: Any, *args: Any,
                                   **kwargs: Any) -> Any:  # fmt: skip
        """In the loop, or after it as a part of its own."""
        if self._session is None or self._log is None:
            return original(prefix, forward_step_func, *args, **kwargs)
        progress = self._log

        def evaluated() -> None:
            with progress.once(f"loss at {prefix} |"):
                original(prefix, self._stepping(forward_step_func), *args, **kwargs)

        self._made(evaluated)

    def evaluate(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """What it finds is printed once, so it must be true."""
        found = original(*args, **kwargs)
        if self._session is not None and self._log is not None:
            self._session.exchanged()
        return found

    def save_checkpoint_and_time(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """In the loop, or after it as a part of its own."""
        if self._session is None or self._loop is None or self._groups is None:
            return original(*args, **kwargs)
        current, loop, groups = self._session, self._loop, self._groups

        def written() -> None:
            timer = self._training.get_timers()("interval-time", log_level=0)
            if not getattr(timer, "_started", True):  # of a worker that begins with this part
                timer.start()
            # From here on a failure finds every role's state of this step safe: the job does not go back to
            # one that comes before its newest checkpoint, and does not leave there if it leaves after this.
            current.secure()
            torch.distributed.barrier()
            if self._saved_in != current.epoch:
                self._saved_in = current.epoch
                found = inspect.signature(original).bind(*args, **kwargs)
                saves.forget_plans(found.arguments.get("checkpointing_context"))
                if current.role == 0:
                    saves.remove_torn(self._training.get_args())
            current.point("save")
            self._saving = True
            try:
                original(*args, **kwargs)
            finally:
                self._saving = False

        def saved() -> None:
            self._postponed = None
            if self._inside and not groups.settled:
                log.warning(
                    "iteration %d is not saved: replica groups are away, or back for a few steps only; "
                    "the copies in memory go on",
                    loop.iteration,
                )
                self._postponed = written
            elif groups.all_are_there:
                written()
            else:
                groups.await_all()

        self._made(saved)

    def save_checkpoint(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Without the time in 0.17, after the loop."""
        save = original if self._saving else functools.partial(self.save_checkpoint_and_time, original)
        return save(*args, **kwargs)

    def write_args_to_tensorboard(self, original: Any, *args: Any, **kwargs: Any) -> None:
        """Only where this process has not done so before."""
        if self._session is None or not self._again:
            original(*args, **kwargs)

    def _made(self, call: Callable[[], None]) -> None:
        if self._inside:
            call()
        else:
            self._part(call, lambda: None)

    def _stepping(self, forward_step_func: Any) -> Any:
        """`forward_step_func`, with the places where failures are injected for tests and drills."""
        current = self._session
        if current is None or not current.injecting:
            return forward_step_func

        @functools.wraps(forward_step_func)
        def stepped(data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            found = forward_step_func(data_iterator, model, *args, **kwargs)
            current.point("forward" if torch.is_grad_enabled() else "evaluate")
            if isinstance(found[0], torch.Tensor) and found[0].requires_grad:
                found[0].register_hook(lambda gradient: current.point("backward"))
            return found

        return stepped

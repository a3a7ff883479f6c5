# SPDX-License-Identifier: Apache-2.0
"""Requests, faults and the passing of time. What must hold whatever they do stands in `checks`."""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request, RequestStatus

from kvcache.control.wire import FlushScope
from tests.simulator.checks import Broken, Checks, sides
from tests.simulator.copies import Injected
from tests.simulator.engine import MAX_MODEL_LEN, Engine, Shape
from tests.simulator.runner import Runner
from tests.simulator.values import VOCABULARY, Model

_MOST_STEPS_WITHOUT_END = 3000


@dataclass(frozen=True)
class Faults:
    """How often things go wrong, each from 0 to 1."""

    copy: float = 0.0
    """A load or a store cannot be made."""
    lookup: float = 0.0
    """A rank does not answer a lookup in time."""
    plan: float = 0.0
    """Planning of a request's part in a step raises."""
    vanish: float = 0.0
    """Before a step, chunks are gone although they were leased."""
    slow: float = 0.0
    """A tier below answers badly."""
    hang: float = 0.0
    """It does not answer at all."""
    hooks: float = 0.0
    """A forward that should call the hooks around each layer's attention does not."""
    report: float = 0.0
    """What a rank has to tell the scheduler comes a step late, but for the loads that are ready."""


@dataclass
class _Step:
    output: Any
    loadable: set[int]
    """Blocks that its loads may write."""
    result: Any = None
    wrong: set[str] = field(default_factory=set)
    """Requests that computed upon blocks which are known to be unfilled."""


class World:
    """One engine and the requests that come to it. Every choice is the dice's."""

    def __init__(self, shape: Shape, faults: Faults, dice: random.Random, model_dir: Path) -> None:
        self.shape, self.faults, self.dice = shape, faults, dice
        self.seen: Counter[str] = Counter()
        self.model = Model(
            [
                (shape.named_by(worker), shape.layers_of(worker), shape.lanes_of(worker))
                for worker in range(shape.workers)
            ],
            shape.block_size,
            whole_pages=shape.whole_pages,
        )
        self.checks = Checks(shape, self.model, self.seen)
        self.engine = Engine(
            shape, model_dir, dice, self._roll("lookup"), self._roll("copy"), self.checks.check_write
        )
        self._quiet = False
        self._roots: dict[str, int] = {}
        self._texts: list[tuple[str, list[int]]] = [("", [])]
        """Salt and tokens of every request so far."""
        self._requests: dict[str, Request] = {}
        self._steps: deque[_Step] = deque()
        self._next_request = 0
        self._unfilled: set[int] = set()
        """Blocks that vLLM was told are unfilled, or that it computed upon such, and not written since."""
        self._excused: set[str] = set()
        """Requests of which vLLM took a token that it computed upon blocks that it knew to be unfilled."""
        self._steps_without_end = 0
        self.runner = Runner(
            self.model,
            self.engine.ranks,
            self.engine.config,
            shape.block_size,
            asynchronous=shape.depth > 1,
            root_of=self._roots.__getitem__,
            drafts=self._drafts if shape.drafts else None,
            replays=lambda: dice.random() < 0.2,
            hooks_fail=self._roll("hooks"),
        )
        self._inject()
        self.checks.watch(self.engine)

    # What may happen

    def operate(self) -> None:
        """One operation."""
        operations: list[tuple[int, Callable[[], None]]] = [
            (70, self.step),
            (16, self.add_request),
            (3, self.abort),
            (1, self.preempt_all),
            (25, self.forget_gpu),
            (1, self.flush),
            (3, self.deliver),
            (6, self.poll),
            (25, self.wait),
        ]
        weights = [weight for weight, _ in operations]
        self.dice.choices([operation for _, operation in operations], weights)[0]()

    def add_request(self) -> None:
        """Of a prompt that shares a part with one before, most of the time."""
        if len(self._requests) >= 2 * self.shape.max_seqs:
            return
        salt, text = self.dice.choice(self._texts[-30:])
        shared = len(text) if self.dice.random() < 0.7 else self.dice.randint(0, len(text))
        unit = self.dice.choice((1, self.shape.block_size, self.shape.chunk_size))
        new = self.dice.choice((0, 1, self.dice.randint(1, 6 * self.shape.chunk_size)))
        length = min((shared + new) // unit * unit or 1, self._most_tokens() - 60)
        prompt = (text[:shared] + [self._token() for _ in range(length)])[:length]
        if self.dice.random() < 0.1:
            salt = self.dice.choice(("", "a", "b"))
        self._add(salt, prompt, self.dice.choice((1, 1, 2, 5, self.dice.randint(1, 50))))

    def abort(self) -> None:
        # Without asynchronous scheduling vLLM hears of it before a step or after its execution.
        if self._requests and (self.shape.depth > 1 or all(step.result for step in self._steps)):
            waiting = RequestStatus.WAITING_FOR_REMOTE_KVS
            loading = [name for name, request in self._requests.items() if request.status == waiting]
            some = loading if loading and self.dice.random() < 0.5 else self._requests
            req_id = self.dice.choice(sorted(some))
            self.seen[f"aborted {self._requests[req_id].status.name}"] += 1
            self.engine.scheduler.finish_requests(req_id, RequestStatus.FINISHED_ABORTED)
            self._ended(req_id)

    def preempt_all(self) -> None:
        """As for new weights: every running request starts over."""
        waiting_for_loads = any(
            request.status == RequestStatus.WAITING_FOR_REMOTE_KVS for request in self._requests.values()
        )
        scheduler = self.engine.scheduler
        # vLLM refuses while blocks are held for others.
        if not (self._steps or waiting_for_loads or self._held() or scheduler.kv_holding_waiting):
            scheduler.reset_prefix_cache(reset_running_requests=True)
            self.seen["all preempted"] += 1

    def forget_gpu(self) -> None:
        """vLLM's prefix cache finds none of its blocks any more, as if others had needed them."""
        forgotten = self.dice.choice((0.2, 1.0))
        blocks = {block for block in range(1, self.shape.num_blocks) if self.dice.random() < forgotten}
        self.engine.scheduler.kv_cache_manager.evict_blocks(blocks)

    def forget_everything_on_the_gpu(self) -> None:
        self.engine.scheduler.kv_cache_manager.evict_blocks(set(range(1, self.shape.num_blocks)))

    def flush(self) -> None:
        for impl in self.engine.rank_impls:
            impl.flush(["cpu"], FlushScope())

    def deliver(self) -> None:
        self.engine.lookups.deliver()

    def poll(self) -> None:
        """Time passes: copies end."""
        for side in sides(self.engine):
            side.engine.poll()

    def wait(self) -> None:
        """Time passes in the tiers below."""
        self.engine.slow.advance(self.dice, self._roll("slow"), self._roll("hang"))

    def vanish(self) -> None:
        """As when leases had run out: chunks go that somebody counts on, unless a copy reads them now."""
        for side in sides(self.engine):
            tier = side.engine.storage.cpu
            reading = {copies.plan.owner for copies in side.engine._loads}
            # Those who write have leases that do not run out.
            tier.release_where(
                lambda owner, reading=reading: owner not in reading and not owner.startswith("writing/")
            )
            for key in list(tier._index):
                if self.dice.random() < 0.5:
                    tier._room.remove(key)

    def step(self) -> None:
        """Schedules, executes or takes in a step, as vLLM's engine loop may."""
        if not self._steps and not self.engine.scheduler.has_requests():
            return
        executable = next((step for step in self._steps if step.result is None), None)
        room = len(self._steps) < self.shape.depth and self.engine.scheduler.has_requests()
        if room and (not self._steps or self.dice.random() < 0.7):
            self._schedule()
        elif executable is not None:
            self._execute(executable)
        else:
            self._take_in(self._steps.popleft())

    def run(self, operations: int) -> None:
        for _ in range(operations):
            self.operate()
        self.finish()

    def finish(self) -> None:
        """No more faults or requests: all that is there ends, and leaves nothing."""
        self._quiet = True
        self._run_out()
        if any(impl._report.worker for impl in self.engine.rank_impls):
            # What came late goes with the next step, whosever it is.
            self._add("", [self._token()], 1)
            self._run_out()
        self.engine.slow.finish()
        self.deliver()
        for _ in range(40):
            self.poll()
        storages = [side.engine.storage for side in sides(self.engine)]
        for _ in range(
            500 if self.shape.sockets else 0
        ):  # a rank hears over its socket that a lookup has ended
            if not any(storage.cpu.stats().leases or storage._fetcher._searches for storage in storages):
                break
            time.sleep(0.01)
        self.checks.check_end()

    def _run_out(self) -> None:
        while self._steps or self.engine.scheduler.has_requests():
            self.step()
            self.wait()

    def close(self) -> None:
        self.engine.close()

    # Parts of a step

    def _schedule(self) -> None:
        if not self._quiet and self.dice.random() < self.faults.vanish:
            self.vanish()
        self.checks.loadable = set()
        output = self.engine.scheduler.schedule()
        self.seen["preempted"] += len(output.preempted_req_ids or ())
        self.seen["resumed"] += len(output.scheduled_cached_reqs.resumed_req_ids)
        self._steps.append(_Step(output, self.checks.loadable))

    def _execute(self, step: _Step) -> None:
        self.checks.loadable = step.loadable
        step.result = self.runner.execute(step.output)
        report = step.result.kv_connector_output
        if report is not None and report.invalid_block_ids:
            self.seen["failed loads"] += 1
            faults = self.faults
            if not (faults.copy or faults.plan or faults.vanish or faults.hooks):
                raise Broken("a load failed although what it loads was there")
            self._unfilled |= report.invalid_block_ids
        wrong = {req_id: blocks for req_id, blocks in self.runner.wrong_reads.items() if blocks}
        for req_id, written in self.runner.written.items():
            if req_id not in wrong:
                self._unfilled.difference_update(written)
        for req_id, blocks in wrong.items():
            if not blocks & self._unfilled:
                raise Broken(f"{req_id} reads wrong KV in blocks {sorted(blocks)}, and vLLM was not told")
            self._unfilled.update(self.runner.written[req_id])
        step.wrong = set(wrong)

    def _take_in(self, step: _Step) -> None:
        if step.result is None:
            self._execute(step)
        drafts = dict(self.runner.draft_tokens)
        scheduler = self.engine.scheduler
        exposed = step.wrong & self._requests.keys()
        before = {req_id: self._requests[req_id].num_output_tokens for req_id in exposed}
        scheduler.update_from_output(step.output, step.result)
        for req_id, tokens in before.items():
            if self._requests[req_id].num_output_tokens > tokens:
                self.seen["wrong token taken by vLLM"] += 1
                self._excused.add(req_id)
        if self.shape.drafts and drafts:
            scheduler.update_draft_token_ids(DraftTokenIds(list(drafts), list(drafts.values())))
        self.checks.check_counters()
        for req_id in step.output.num_scheduled_tokens:
            request = self._requests.get(req_id)
            if request is not None:
                if req_id not in self._excused:
                    self.checks.check_output(request, self._roots[req_id])
                if request.is_finished():
                    self._ended(req_id)
        self._steps_without_end += 1
        if self._steps_without_end > _MOST_STEPS_WITHOUT_END:
            raise Broken(f"no request has ended for {self._steps_without_end} steps: {self._requests}")

    def _add(self, salt: str, prompt: list[int], max_tokens: int) -> None:
        req_id = f"r{self._next_request}"
        self._next_request += 1
        request = Request(
            request_id=req_id,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            pooling_params=None,
            cache_salt=salt or None,
            block_hasher=self.engine.block_hasher,
        )
        self._roots[req_id] = self.model.root(salt)
        self._requests[req_id] = request
        self._texts.append((salt, prompt))
        self.seen["requests"] += 1
        self.engine.scheduler.add_request(request)

    def _ended(self, req_id: str) -> None:
        request = self._requests.pop(req_id)
        self._texts.append((request.cache_salt or "", list(request.all_token_ids)))
        self._steps_without_end = 0

    def _token(self) -> int:
        return self.dice.randrange(3, VOCABULARY + 3)

    def _most_tokens(self) -> int:
        """A prompt must fit into the pool."""
        return min(MAX_MODEL_LEN - 1, (self.shape.num_blocks - 1) * self.shape.block_size)

    def _drafts(self, prefix: int) -> list[int]:
        drafts = []
        for _ in range(self.dice.randint(0, self.shape.drafts)):
            token = self.model.next_token(prefix)
            drafts.append(token if self.dice.random() < 0.7 else token ^ 1)
            prefix = self.model.hashes(prefix, drafts[-1:])[0]
        return drafts

    def _held(self) -> bool:
        return len(self.engine.scheduler.requests) > len(self._requests)

    def _roll(self, fault: str) -> Callable[[], bool]:
        def fails() -> bool:
            rate = getattr(self.faults, fault)
            happens = rate > 0 and not self._quiet and self.dice.random() < rate
            self.seen[f"fault {fault}"] += happens
            return bool(happens)

        return fails

    def _waits_outside(self, others: int) -> bool:
        return self.shape.behind and others > 0 and self.dice.random() < 0.5

    def _inject(self) -> None:
        """Faults and time of the scheduler's side."""
        for impl in self.engine.rank_impls:
            report: Any = impl._report
            report.take_worker_metadata = _or_fail(self._roll("report"), report.take_worker_metadata)
        side = self.engine.scheduler_impl._scheduler
        if side is not None:
            if self.shape.mixed_loads:
                copies: Any = side._copies
                copies.worth_waiting_outside = lambda mode, tokens, others: self._waits_outside(others)
            side._lookups._clock = self.engine.slow.clock
            side._lookups._seconds_per_token = lambda: self.dice.choice((0.0, 1e-3, 0.1))
            for part in ("_begin_step", "_add_save", "_add_async_load"):
                setattr(side, part, _or_fail(self._roll("plan"), getattr(side, part)))


def _or_fail(fails: Callable[[], bool], part: Callable[..., Any]) -> Callable[..., Any]:
    def part_or_fail(*arguments: Any) -> Any:
        if fails():
            raise Injected("a plan")
        return part(*arguments)

    return part_or_fail

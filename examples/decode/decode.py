"""Prefill and speculative decode with a PcieDcpGroup, as a serving engine does it.

    python examples/decode/decode.py --ranks 1,2,4 --tokens 64             # threads, no GPU needed
    python examples/decode/decode.py --device cuda:0 --ranks 1,2,4,8 --tokens 512
    python examples/decode/decode.py --ranks 2 --tokens 32 --beside        # and torch.distributed

A draft of one layer proposes, the target checks all proposals of all sequences in one step. Each
has a channel of its own, so that one engine could run both at once. On a GPU a step is a CUDA graph
for each bucket of rows; steps of fewer rows are padded. Streams of all worlds must be equal.

Exit code: 0; 1 if two worlds decoded different tokens.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from model import EXPERTS, HIDDEN, Decoder, Gather, Shape
from pcie_comm import PcieDcpGroup, kimi_topk16, local_world

PROPOSALS = 3
PROMPT = (3, 141, 59, 265)
Lane = Callable[[str], Gather]
"""Given the name of a channel, its collective."""


class Stepper:
    """One model's step, for any number of rows: a graph for each bucket on a GPU, else a call.

    Args:
        decoder: The model.
        gather: Its collective.
        buckets: Numbers of rows to be ready for.
    """

    def __init__(self, decoder: Decoder, gather: Gather, buckets: Sequence[int]) -> None:
        self._decoder, self._gather = decoder, gather
        self._on_gpu = decoder.device.type == "cuda"
        self._buffers = {rows: self._make_buffers(rows) for rows in buckets}
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def _make_buffers(self, rows: int) -> tuple[torch.Tensor, ...]:
        """Return what a step copies in, where to, and where it copies its answers.

        On the host's side in pinned memory. A copy from or to memory that is not pinned keeps all
        other threads of the process from launching until it is done, also the ranks that it is
        waiting for.
        """
        asked = torch.zeros(3, rows, dtype=torch.int64, pin_memory=self._on_gpu)
        answers = torch.zeros(rows, dtype=torch.int64, pin_memory=self._on_gpu)
        return asked, torch.zeros_like(asked, device=self._decoder.device), answers

    def _step(self, rows: int, gather: Gather) -> None:
        """Do what the graph of a bucket holds."""
        asked, inputs, answers = self._buffers[rows]
        inputs.copy_(asked, non_blocking=True)
        answers.copy_(self._decoder.step(*inputs, gather), non_blocking=True)

    def warm_up(self, gather: Gather | None = None) -> None:
        """Run all buckets once, with another collective if one is given."""
        for rows in self._buffers:
            self._step(rows, gather or self._gather)

    def capture(self) -> None:
        """Capture all buckets on the current stream. No rank of this process may be waiting.

        The stream is this rank's own: torch keeps the workspace of matrix products by the stream
        that they were captured on, and replays of two ranks at once must not share one.
        """
        if not self._on_gpu:
            return
        torch.cuda.current_blas_handle()  # of this thread; a capture must not create it
        for rows in self._buffers:
            graph, own = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
            with torch.cuda.graph(graph, stream=own, capture_error_mode="thread_local"):
                self._step(rows, self._gather)
            self._graphs[rows] = graph

    def __call__(self, rows: Sequence[tuple[int, int, int]]) -> list[int]:
        """Run one step.

        Args:
            rows: Token, sequence and position of each.

        Returns:
            The next token of each.
        """
        bucket = min(size for size in self._buffers if size >= len(rows))
        padding = (0, 0, self._decoder.shape.length - 1)  # a place that no row looks at
        asked, _, answers = self._buffers[bucket]
        asked.copy_(torch.tensor([*rows, *[padding] * (bucket - len(rows))]).T)
        if bucket in self._graphs:
            self._graphs[bucket].replay()
        else:
            self._step(bucket, self._gather)
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()
        return [int(token) for token in answers[: len(rows)].tolist()]


class Engine:
    """One rank: target and draft, and the sequences that it decodes.

    Args:
        shape: Of the target.
        rank, world_size, device: Which part of the model, and where.
        lane: Gives the collective of a channel.
    """

    def __init__(
        self, shape: Shape, rank: int, world_size: int, device: torch.device, lane: Lane
    ) -> None:
        sizes = [1 << i for i in range(shape.sequences.bit_length())]
        checked = [(PROPOSALS + 1) * size for size in sizes]
        target = Decoder(shape, rank, world_size, device)
        draft = Decoder(shape, rank, world_size, device, layers=1)
        self.target = Stepper(target, lane("target"), sorted({*sizes, *checked}))
        self.draft = Stepper(draft, lane("draft"), sizes)
        self.shape = shape
        self.accepted = 0

    def warm_up(self, gather: Gather | None = None) -> None:
        """Run all steps of both models once."""
        for stepper in (self.target, self.draft):
            stepper.warm_up(gather)

    def capture(self) -> None:
        """Capture all steps of both models."""
        for stepper in (self.target, self.draft):
            stepper.capture()

    def decode(self, lengths: Sequence[int]) -> list[list[int]]:
        """Decode one sequence per length, from prompts that differ in their first token."""
        streams = [[PROMPT[0] + number, *PROMPT[1:]] for number in range(len(lengths))]
        for place in range(len(PROMPT) - 1):  # prefill
            rows = [(stream[place], number, place) for number, stream in enumerate(streams)]
            self.target(rows)
            self.draft(rows)
        goals = [len(PROMPT) + length for length in lengths]
        while live := [n for n, goal in enumerate(goals) if len(streams[n]) < goal]:
            self._advance(streams, live)
        return [stream[:goal] for stream, goal in zip(streams, goals, strict=True)]

    def _advance(self, streams: list[list[int]], live: Sequence[int]) -> None:
        """Propose with the draft, check with the target, keep what both agree on and one more."""
        proposed = [[streams[number][-1]] for number in live]
        for ahead in range(PROPOSALS):
            rows = [
                (tokens[-1], number, len(streams[number]) - 1 + ahead)
                for number, tokens in zip(live, proposed, strict=True)
            ]
            for tokens, token in zip(proposed, self.draft(rows), strict=True):
                tokens.append(token)
        rows = [
            (token, number, len(streams[number]) - 1 + ahead)
            for number, tokens in zip(live, proposed, strict=True)
            for ahead, token in enumerate(tokens)
        ]
        answers = self.target(rows)
        for place, (number, tokens) in enumerate(zip(live, proposed, strict=True)):
            right = answers[place * (PROPOSALS + 1) : (place + 1) * (PROPOSALS + 1)]
            kept = 0
            while kept < PROPOSALS and tokens[kept + 1] == right[kept]:
                kept += 1
            self.accepted += kept
            streams[number] += right[: kept + 1]


def lengths_of(tokens: int, sequences: int) -> list[int]:
    """Return how many tokens each sequence gets: `tokens`, and less and less."""
    return [max(1, tokens >> number) for number in range(sequences)]


def engine_of(group: PcieDcpGroup, shape: Shape) -> Engine:
    """Build a rank's engine. Collective."""
    lanes = {name: group.channel(name) for name in ("target", "draft")}
    most = shape.sequences * (PROPOSALS + 1)
    group.prepare("all_gather_pair_kimi_topk", rows=most)
    return Engine(
        shape,
        group.rank,
        group.world_size,
        group.device,
        lambda name: lanes[name].all_gather_pair_kimi_topk,
    )


def stand_in(
    local: torch.Tensor, logits: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return results of the right shape without talking to a peer."""
    down = local.repeat(1, HIDDEN // local.shape[1])
    return (down, *kimi_topk16(logits.repeat(1, EXPERTS // logits.shape[1]), bias))


def run_world(world_size: int, device: str, shape: Shape, tokens: int) -> dict[str, object]:
    """Decode with `world_size` ranks in this process; return streams and tokens per second."""
    lengths = lengths_of(tokens, shape.sequences)
    with local_world(world_size, device=device) as world:
        engines = world.run(lambda group: engine_of(group, shape))
        # What torch loads at its first use must not be loaded while a rank waits for another.
        world.run(lambda group: engines[group.rank].warm_up(stand_in))
        world.run(lambda group: engines[group.rank].warm_up())
        for engine, stream in zip(engines, world.streams, strict=False):  # none without a GPU
            with torch.cuda.stream(stream):
                engine.capture()
        started = time.perf_counter()
        streams = world.run(lambda group: engines[group.rank].decode(lengths))
        elapsed_s = time.perf_counter() - started
    if any(one != streams[0] for one in streams):
        raise SystemExit(f"the ranks of a world of {world_size} decoded different tokens")
    return {
        "streams": streams[0],
        "tokens_per_s": round(sum(lengths) / elapsed_s, 1),
        "accepted": engines[0].accepted,
    }


def _numbers_of_ranks(text: str) -> list[int]:
    numbers = text.split(",")
    if not set(numbers) <= {"1", "2", "4", "8"}:
        raise argparse.ArgumentTypeError(f"{text!r}: this model is cut for 1, 2, 4 or 8 ranks")
    return [int(number) for number in numbers]


def main(argv: Sequence[str] | None = None) -> int:
    """Decode with every number of ranks; compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--ranks", type=_numbers_of_ranks, default="1,2,4", help="numbers of ranks: 1, 2, 4 or 8"
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda:N, or cuda for all in turn")
    parser.add_argument("--tokens", type=int, default=64, help="of the longest sequence")
    parser.add_argument("--sequences", type=int, default=4, help="decoded at a time")
    parser.add_argument("--beside", action="store_true", help="also with torch.distributed (gloo)")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    length = len(PROMPT) + options.tokens + PROPOSALS + 2
    shape = Shape(length=length, sequences=options.sequences)
    first: object = None
    for world_size in options.ranks:
        found = run_world(world_size, options.device, shape, options.tokens)
        first = first or found["streams"]
        same = found["streams"] == first
        facts = f"{found['tokens_per_s']} tokens/s, {found['accepted']} proposals accepted"
        print(f"ranks={world_size}: {facts}, equal streams: {same}")
        if options.beside and world_size > 1:
            from beside import run_processes

            other = run_processes(world_size, options.device, shape, options.tokens)
            ratio = float(str(found["tokens_per_s"])) / float(str(other["tokens_per_s"]))
            same = same and other["streams"] == first
            print(
                f"  torch.distributed: {other['tokens_per_s']} tokens/s; ours is {ratio:.2f} times"
            )
        if not same:
            print("different tokens")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

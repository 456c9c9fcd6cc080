"""The suffix drafter against arctic-inference's suffix decoding, which vLLM uses: accepted tokens and microseconds per draft.

    python benchmarks/cpu/suffix_vs_arctic.py

Needs `pip install arctic-inference` (its C++ extension; no vLLM). Both drafters replay the same responses: they draft, the
longest path that equals the recorded tokens counts as accepted, and one more token follows, as in a verification step. The
requests of a prompt advance in turns, and both drafters see everything that was generated before. Streams:

- `collatz`: responses of the bundled policy at temperature 1, with their sampling seeds, 8 per prompt.
- `phrases_greedy`: responses mixed from a small set of phrases, at temperature 0.
- `phrases_sampled`: the same kind of text, the phrase chosen with the seed's sampling noise.

arctic keeps one tree of all responses, so its history is that of ours with a shared history; otherwise ours keeps prompts apart.

Drafters: arctic as a chain and as a tree, with its defaults; ours as a chain (width 1) and as a tree (width 2), ranked by counts
alone (tau 0) and with the sampling noise (tau 1). At most 16 draft tokens each. `draft_us` is the median time of one draft for
one request, `extend_us` that of appending the accepted tokens; the engine calls ours once for all requests of a step.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

if not __package__:  # run as a file: the repository's root takes the place of this folder in the path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np
import torch

from benchmarks.lib.results import Report, add_result_arguments, package_versions
from paceline import Engine, SamplingParams
from paceline.drafters.suffix import SuffixDrafter
from paceline.kernels.noise import gumbel
from paceline.models.weights import load_model
from paceline.tasks import make_task

BUDGET = 16
"""Maximum number of draft tokens per draft."""


class Response(NamedTuple):
    """One recorded response."""

    prompt: list[int]
    tokens: list[int]
    seed: int
    temperature: float


class Draft(NamedTuple):
    """A draft tree: parents are indices of nodes, -1 for children of the root."""

    tokens: list[int]
    parents: list[int]


class Ours:
    """The suffix drafter of this package, one history per prompt or one for all."""

    def __init__(self, width: int, tau: float, shared: bool = False) -> None:
        self._drafter, self._width, self._tau = SuffixDrafter(shared=shared), width, tau
        self._requests: dict[int, Response] = {}

    def start(self, request: int, response: Response) -> None:
        self._requests[request] = response
        self._drafter.start(request, response.prompt)

    def draft(self, request: int, text: list[int]) -> Callable[[], Draft]:
        response = self._requests[request]
        found = self._drafter.draft([request], BUDGET, self._width, [BUDGET], [response.seed], [len(text)],
                                    [response.temperature], self._tau)
        count = int(found.num_nodes[0])
        return lambda: Draft(found.tokens[0, :count].tolist(), found.parents[0, :count].tolist())

    def extend(self, request: int, tokens: list[int]) -> None:
        self._drafter.extend(request, tokens)

    def finish(self, request: int) -> None:
        self._drafter.finish(request)


class Arctic:
    """arctic-inference's suffix decoding: a tree of each request's prompt and response, and one of all responses."""

    def __init__(self, tree: bool) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache  # only here: --help works without the package

        self._cache, self._tree = SuffixDecodingCache(), tree

    def start(self, request: int, response: Response) -> None:
        self._cache.start_request(request, response.prompt)

    def draft(self, request: int, text: list[int]) -> Callable[[], Draft]:
        context = np.array(text[-self._cache.max_tree_depth :], np.int32)
        found = self._cache.speculate(request, context, max_spec_tokens=BUDGET, use_tree_spec=self._tree)
        return lambda: Draft(list(found.token_ids), list(found.parents))

    def extend(self, request: int, tokens: list[int]) -> None:
        self._cache.add_active_response(request, tokens)

    def finish(self, request: int) -> None:
        self._cache.stop_request(request)


DRAFTERS: dict[str, Callable[[], Ours | Arctic]] = {
    "arctic chain": lambda: Arctic(tree=False),
    "arctic tree": lambda: Arctic(tree=True),
    "ours chain, counts": lambda: Ours(1, 0.0),
    "ours chain, noise": lambda: Ours(1, 1.0),
    "ours tree, counts": lambda: Ours(2, 0.0),
    "ours tree, noise": lambda: Ours(2, 1.0),
    "ours tree, counts, shared history": lambda: Ours(2, 0.0, shared=True),
    "ours tree, noise, shared history": lambda: Ours(2, 1.0, shared=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=12, help="prompts of each stream")
    parser.add_argument("--group", type=int, default=8, help="responses per prompt")
    add_result_arguments(parser, "cpu/suffix_vs_arctic")
    args = parser.parse_args()
    peers = package_versions(["arctic-inference"])
    if "arctic-inference" not in peers:
        raise SystemExit("arctic-inference is not installed: pip install arctic-inference")
    torch.set_num_threads(1)
    report = Report(args, peer_versions=peers, threads=1, budget=BUDGET, prompts=args.prompts, group=args.group, streams={})
    for name, make in (("collatz", collatz), ("phrases_greedy", phrases_greedy), ("phrases_sampled", phrases_sampled)):
        groups = make(args.prompts, args.group)
        for build in DRAFTERS.values():
            replay(build(), groups[:1])  # compiles, and warms the caches up
        found = {drafter: replay(build(), groups) for drafter, build in DRAFTERS.items()}
        tokens = sum(len(response.tokens) for group in groups for response in group)
        report.content["streams"][name] = {"tokens": tokens, "drafters": found}
        show(name, tokens, found)
        report.save()
    print(report.file)


def replay(drafter: Ours | Arctic, groups: Iterable[Sequence[Response]]) -> dict[str, float]:
    """Replays groups one after the other, the requests of a group in turns."""
    drafts = accepted = drafted = number = 0
    draft_us, extend_us = list[float](), list[float]()
    for group in groups:
        first, number = number, number + len(group)
        done = [0] * len(group)
        for i, response in enumerate(group):
            drafter.start(first + i, response)
        while any(at < len(response.tokens) for at, response in zip(done, group, strict=True)):
            for i, response in enumerate(group):
                if done[i] >= len(response.tokens):
                    continue
                text = response.prompt + response.tokens[: done[i]]
                began = time.perf_counter()
                found = drafter.draft(first + i, text)
                draft_us.append(1e6 * (time.perf_counter() - began))
                draft = found()
                length = accept(draft, response.tokens[done[i] :])
                new = response.tokens[done[i] : done[i] + length + 1]
                began = time.perf_counter()
                drafter.extend(first + i, new)
                extend_us.append(1e6 * (time.perf_counter() - began))
                done[i] += len(new)
                drafts, accepted, drafted = drafts + 1, accepted + length, drafted + len(draft.tokens)
        for i in range(len(group)):
            drafter.finish(first + i)
    return {"accepted_per_draft": accepted / drafts, "drafted_per_draft": drafted / drafts, "drafts": drafts,
            "draft_us": statistics.median(draft_us), "extend_us": statistics.median(extend_us)}


def accept(draft: Draft, truth: list[int]) -> int:
    """Returns the number of tokens of the longest path from the root that equals the recorded tokens."""
    children = {(parent, token): i for i, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True))}
    node, length = -1, 0
    while length < len(truth) and (node, truth[length]) in children:
        node, length = children[node, truth[length]], length + 1
    return length


def collatz(num_prompts: int, group: int) -> list[list[Response]]:
    """Responses of the bundled policy."""
    model, tokenizer = load_model(Path(str(files("paceline") / "assets" / "collatz")), "cpu", torch.float32)
    engine, task = Engine(model, tokenizer, drafter="none", strategy="off"), make_task("collatz")
    prompts = [task[i].prompt for i in range(num_prompts)]
    groups = engine.generate(prompts, SamplingParams(temperature=1.0, max_new_tokens=256, seed=1), group)
    return [[Response(r.prompt_ids, r.token_ids, r.seed, 1.0) for r in found.rollouts] for found in groups]


def phrases_greedy(num_prompts: int, group: int) -> list[list[Response]]:
    """Each prompt has 12 phrases of 4 to 20 tokens, of which its responses choose 20 at random."""
    return _phrases(num_prompts, group, 0.0)


def phrases_sampled(num_prompts: int, group: int) -> list[list[Response]]:
    """The same, but the phrase is chosen by argmax of the seed's noise over the phrases' first tokens."""
    return _phrases(num_prompts, group, 1.0)


def _phrases(num_prompts: int, group: int, temperature: float) -> list[list[Response]]:
    groups = []
    for p in range(num_prompts):
        rng = random.Random(f"phrases/{p}")
        heads = rng.sample(range(1000, 2000), 12)
        bodies = {head: [rng.randrange(1000) for _ in range(rng.randrange(3, 20))] for head in heads}
        prompt = [rng.randrange(1000) for _ in range(16)]
        responses = []
        for _ in range(group):
            seed, tokens = rng.getrandbits(63), list[int]()
            for _ in range(20):
                head = rng.choice(heads)
                if temperature > 0:
                    noise = gumbel(torch.tensor([seed]), torch.tensor([len(prompt) + len(tokens)]), torch.tensor(heads))
                    head = heads[int(noise.argmax())]
                tokens += [head, *bodies[head]]
            responses.append(Response(prompt, tokens, seed, temperature))
        groups.append(responses)
    return groups


def show(name: str, tokens: int, found: dict[str, Any]) -> None:
    print(f"{name}: {tokens} tokens")
    for drafter, each in found.items():
        print(f"  {drafter:34s} accepted {each['accepted_per_draft']:5.2f} of {each['drafted_per_draft']:5.2f} per draft, "
              f"draft {each['draft_us']:6.1f} us, extend {each['extend_us']:5.1f} us")


if __name__ == "__main__":
    main()

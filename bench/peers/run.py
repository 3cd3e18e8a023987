"""Lets kvpress's presses and transformers' caches answer what kvfold was asked.

    bench/peers/setup.sh PEERS
    PEERS/bin/python bench/peers/run.py OUT

Reads OUT/questions.jsonl, which `bench/peers/exchange.py ask OUT` writes, and leaves
OUT/answers.jsonl. Runs in the environment of `setup.sh` and needs nothing of kvfold. Called again
it goes on where it stopped; samples come one after the other, so that all peers have as many.

A press cuts a cache to as many tokens a layer as kvfold's caches keep when they have read the
context; then the question is read, and the answer decoded greedily, at the positions that they
have. Presses act behind a layer's attention and change nothing that the next layer reads, so the
context is read once for all of them, but for those that read it again themselves. Distances are to
a `DynamicCache` that has read the same.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Cache, DynamicCache, PreTrainedModel, QuantizedCache
from transformers.utils.logging import disable_progress_bar

FORMAT = 1
"""Of the questions."""
EVERYTHING = "1.0"
"""The budget of what keeps all tokens."""
PACKAGES = ("torch", "transformers", "kvpress", "optimum-quanto")
"""Whose versions are noted."""
BITS = 4
"""Of the quantised cache."""


@dataclass(frozen=True)
class Peer:
    """Something that answers."""

    press: Callable[[float], Any] | None = None
    """Makes a press that removes a share of the context; None where nothing is removed."""
    cache: Callable[[PreTrainedModel], Cache] = lambda model: DynamicCache()
    """Makes an empty cache."""
    attention: str = "sdpa"
    """transformers' name of the attention that it needs while the context is read."""
    alone: bool = False
    """Whether it has to read the context by itself."""


def peers() -> dict[str, Peer]:
    """All peers by the names that they have in the tables."""
    return {
        "transformers:dynamic": Peer(),
        "transformers:quantized-4": Peer(cache=_quantized),
        "kvpress:snapkv": _press("SnapKVPress"),
        "kvpress:tova": _press("TOVAPress"),
        "kvpress:knorm": _press("KnormPress"),
        "kvpress:streaming-llm": _press("StreamingLLMPress"),
        "kvpress:observed-attention": _press("ObservedAttentionPress", attention="eager"),
        "kvpress:expected-attention": _press("ExpectedAttentionPress"),
        "kvpress:keydiff": _press("KeyDiffPress"),
        "kvpress:lagkv": _press("LagKVPress"),
        "kvpress:compactor": _press("CompactorPress"),
        "kvpress:adakv-snapkv": _around("AdaKVPress", "SnapKVPress"),
        "kvpress:adakv-expected": _around("AdaKVPress", "ExpectedAttentionPress"),
        "kvpress:criticalkv-snapkv": _around("CriticalKVPress", "SnapKVPress"),
        "kvpress:critical-adakv-snapkv": _around("CriticalAdaKVPress", "SnapKVPress"),
        "kvpress:kvzip": _press("KVzipPress", alone=True),
    }


def _press(name: str, **options: Any) -> Peer:
    return Peer(lambda ratio: _kvpress(name)(compression_ratio=ratio), **options)


def _around(outer: str, inner: str) -> Peer:
    """A press that spreads another's scores."""
    return Peer(lambda ratio: _kvpress(outer)(_kvpress(inner)(compression_ratio=ratio)))


def _kvpress(name: str) -> Callable[..., Any]:
    # Importing kvpress patches transformers' attention, which a reference does without.
    import kvpress

    return getattr(kvpress, name)


def _quantized(model: PreTrainedModel) -> Cache:
    return QuantizedCache(backend="quanto", config=model.config, nbits=BITS)


def main() -> None:
    """Answer what has no answers yet."""
    options = _options()
    head, *questions = _lines(options.folder / "questions.jsonl")
    if head["format"] != FORMAT:
        sys.exit(f"questions.jsonl has format {head['format']}, and {FORMAT} is read here")
    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        head["model"], dtype=getattr(torch, head["dtype"]), attn_implementation="sdpa"
    ).eval()
    answers = Answers(options.folder / "answers.jsonl")
    chosen = {name: peers()[name] for name in options.peers}
    failed: dict[str, str] = {}
    for number, question in enumerate(questions, start=1):
        missing = [
            (name, budget)
            for name, peer in chosen.items()
            for budget in (head["budgets"] if peer.press else [EVERYTHING])
            if (question["id"], name, budget) not in answers and name not in failed
        ]
        _say(f"{question['set']} {number} of {len(questions)}: {len(missing)} answers to come")
        for attention in ("sdpa", "eager"):
            own = [each for each in missing if chosen[each[0]].attention == attention]
            if own:
                model.set_attn_implementation(attention)
                asker = Asker(model, question, head["stop"], failed)
                asker.answer({each: chosen[each[0]] for each in own}, answers)
    for name, why in failed.items():
        _say(f"{name} failed and is left out: {why}")
    if failed:
        sys.exit(1)


class Answers:
    """A file of answers, whole at any time."""

    def __init__(self, path: Path) -> None:
        """Take what is there."""
        self._path = path
        self._rows = _lines(path) if path.exists() else []
        self._versions = {name: _version(name) for name in PACKAGES}

    def __contains__(self, key: tuple[str, str, str]) -> bool:
        return any((row["id"], row["peer"], row["budget"]) == key for row in self._rows)

    def add(self, row: dict[str, Any]) -> None:
        """Add an answer and write the file."""
        self._rows.append({**row, "versions": self._versions})
        temporary = self._path.with_suffix(".partial")
        temporary.write_text("".join(json.dumps(each) + "\n" for each in self._rows))
        os.replace(temporary, self._path)


class Reader:
    """A model with a cache, and where the next token stands in the text.

    Attributes:
        cache: What was read.
        logits: Of what follows, `[V]` in float32.
    """

    def __init__(self, model: PreTrainedModel, cache: Cache, press: Any = None) -> None:
        """Begin at the first position.

        Args:
            model: What reads.
            cache: Empty.
            press: Cuts the cache when the context is read; None if nothing does.
        """
        self.cache, self.logits = cache, torch.empty(0)
        self._model, self._press, self._position = model, press, 0
        self._masks: list[Any] = []

    @torch.inference_mode()
    def read(self, tokens: Sequence[int]) -> torch.Tensor:
        """Read tokens; the logits of what follows."""
        for attention, mask in zip(_attentions(self._model), self._masks, strict=False):
            attention.masked_key_indices = mask
        end = self._position + len(tokens)
        output = self._model(
            input_ids=torch.tensor([list(tokens)]),
            position_ids=torch.arange(self._position, end)[None],
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._position, self.logits = end, output.logits[0, -1].float()
        return self.logits

    def ask(self, question: Sequence[int]) -> None:
        """Read a question, if there is one."""
        if question:
            self.read(question)

    def read_alone(self, context: Sequence[int]) -> None:
        """Read the context under the press."""
        with self._press(self._model):
            self.read(context)
        self._masks = [_take_mask(each) for each in _attentions(self._model)]

    def prepare(self) -> None:
        """Let the press note what it wants to know of the model."""
        if self._press is not None:
            with self._press(self._model):
                pass

    def take_layer(self, module: Any, full: Any, called: tuple[Any, dict], output: Any) -> None:
        """Hold what a full cache's layer holds, and let the press cut it.

        Args:
            module: The layer's attention, which has just read the context.
            full: The full cache's layer.
            called: Arguments of the attention.
            output: What it gave.
        """
        self.cache.update(full.keys, full.values, module.layer_idx)
        if self._press is not None:
            arguments = {**called[1], "past_key_values": self.cache}
            self._press.forward_hook(module, called[0], arguments, output)
        self._masks.append(_take_mask(module))

    def stand_where(self, other: Reader) -> None:
        """Stand after the tokens that another has read, all of whose layers were taken."""
        self._position, self.logits = other._position, other.logits

    def fork(self) -> Reader:
        """An independent copy."""
        other = copy.copy(self)
        other.cache = copy.deepcopy(self.cache)
        return other

    def holdings(self) -> tuple[int, int]:
        """Tokens that a layer keeps, on average, and bytes of the whole cache.

        What a press masks for some heads is counted as gone, though kvpress leaves it in memory;
        what a quantised cache keeps beside its numbers is counted.
        """
        tokens, held = 0.0, 0
        for layer, mask in zip(self.cache.layers, self._masks, strict=True):
            held += sum(each.nbytes for each in _tensors(vars(layer)))
            tokens += layer.get_seq_length()
            if mask is not None:
                _, heads, _, width = layer.keys.shape
                held -= 2 * len(mask[0]) * width * layer.keys.element_size()
                tokens -= len(mask[0]) / heads
        return round(tokens / len(self.cache.layers)), held


class Asker:
    """Asks one question of peers that need the same attention while the context is read."""

    def __init__(
        self,
        model: PreTrainedModel,
        question: dict[str, Any],
        stop: Sequence[int],
        failed: dict[str, str],
    ) -> None:
        """Note what is asked.

        Args:
            model: What answers, with that attention.
            question: As `questions.jsonl` has it.
            stop: Tokens that end an answer.
            failed: By name, why a peer is left out; those that fail are added.
        """
        self._model, self._question, self._stop = model, question, stop
        self._failed = failed
        self._forced: list[int] = []
        self._expected: list[torch.Tensor] = []

    def answer(self, asked: dict[tuple[str, str], Peer], answers: Answers) -> None:
        """Let peers, by name and budget, answer, and keep what they say."""
        readers: dict[tuple[str, str], Reader] = {}
        for key, peer in asked.items():
            with self._may_fail(key[0]):
                readers[key] = self._reader(peer, key[1])
        together = {key: each for key, each in readers.items() if not asked[key].alone}
        full = self._read_context(together)
        self._model.set_attn_implementation("sdpa")
        self._refer(full)
        for key, reader in readers.items():
            name, budget = key
            if name in self._failed:
                continue
            with self._may_fail(name):
                if asked[key].alone:
                    reader.read_alone(self._question["context"])
                row = {"id": self._question["id"], "peer": name, "budget": budget}
                answers.add({**row, **self._found(reader)})

    def _reader(self, peer: Peer, budget: str) -> Reader:
        """A reader with an empty cache, and a press that leaves what a budget allows."""
        press = None
        if peer.press is not None:
            # Half a token more than is to be kept, so that rounding down never loses one.
            kept = (self._question["keep"][budget] + 0.5) / len(self._question["context"])
            press = peer.press(max(0.0, 1 - kept))
        return Reader(self._model, peer.cache(self._model), press)

    def _read_context(self, readers: dict[tuple[str, str], Reader]) -> Reader:
        """Read the context once, and let every reader take it layer by layer; the full cache."""
        full = Reader(self._model, DynamicCache())

        def tell(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            for (name, _), reader in readers.items():
                if name not in self._failed:
                    with self._may_fail(name):
                        layer = full.cache.layers[module.layer_idx]
                        reader.take_layer(module, layer, (args, kwargs), output)

        for (name, _), reader in readers.items():
            with self._may_fail(name):
                reader.prepare()
        hooks = [
            each.register_forward_hook(tell, with_kwargs=True) for each in _attentions(self._model)
        ]
        try:
            full.read(self._question["context"])
        finally:
            for hook in hooks:
                hook.remove()
        for reader in readers.values():
            reader.stand_where(full)
        return full

    def _refer(self, full: Reader) -> None:
        """Let the full cache read the question, and note what it says after each token."""
        full.ask(self._question["question"])
        self._forced = self._question["continuation"]
        if self._forced is None:
            self._forced = self._greedy(full.fork())
        self._expected = [full.read([token]) for token in self._forced]

    def _found(self, reader: Reader) -> dict[str, Any]:
        """What a peer says, how far it is from the full cache, and what it holds."""
        reader.ask(self._question["question"])
        kept, held = reader.holdings()
        free, said, divergences = reader.fork(), [reader.logits], []
        for token, expected in zip(self._forced, self._expected, strict=True):
            said.append(reader.read([token]))
            divergences.append(_divergence(expected, said[-1]))
        agreements = [
            int(one.argmax()) == int(other.argmax())
            for one, other in zip(said[1:], self._expected, strict=True)
        ]
        tokens: list[int] = []
        if self._question["continuation"] is None:
            likeliest = [int(each.argmax()) for each in said]
            tokens = self._forced if self._says(likeliest) else self._greedy(free)
        return {
            "tokens": tokens,
            "divergences": divergences,
            "agreements": agreements,
            "tokens_kept": kept,
            "bytes_held": held,
        }

    def _says(self, likeliest: Sequence[int]) -> bool:
        """Whether tokens found likeliest, one after the other, are the full cache's answer."""
        count = len(self._forced)
        is_cut = count == self._question["max_new_tokens"]
        return likeliest[:count] == self._forced and (is_cut or likeliest[count] in self._stop)

    def _greedy(self, reader: Reader) -> list[int]:
        """The likeliest tokens one after the other, without the one that ends them."""
        said: list[int] = []
        while len(said) < self._question["max_new_tokens"]:
            token = int(reader.logits.argmax())
            if token in self._stop:
                break
            said.append(token)
            reader.read([token])
        return said

    @contextlib.contextmanager
    def _may_fail(self, name: str) -> Iterator[None]:
        """Leave a peer out when it fails, so that the others go on."""
        try:
            yield
        except Exception as error:
            self._failed[name] = f"{type(error).__name__}: {error}"


def _divergence(expected: torch.Tensor, found: torch.Tensor) -> float:
    """`KL(expected || found)` of two rows of logits, in nats."""
    first, second = expected.log_softmax(-1), found.log_softmax(-1)
    return max(float((first.exp() * (first - second)).sum()), 0.0)


def _attentions(model: PreTrainedModel) -> list[Any]:
    return [layer.self_attn for layer in model.model.layers]


def _take_mask(attention: Any) -> Any:
    """What kvpress masks of a layer; the layer forgets it."""
    mask = getattr(attention, "masked_key_indices", None)
    attention.masked_key_indices = None
    return mask


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """All tensors in something, those that a quantised one is made of in its place."""
    if hasattr(value, "__tensor_flatten__"):
        names, _ = value.__tensor_flatten__()
        for name in names:
            yield from _tensors(getattr(value, name))
    elif isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="of an evaluation")
    parser.add_argument(
        "--peers",
        nargs="+",
        choices=list(peers()),
        default=list(peers()),
        metavar="PEER",
        help=f"from: {', '.join(peers())}; all of them by default",
    )
    return parser.parse_args()


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


if __name__ == "__main__":
    main()

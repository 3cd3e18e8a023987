"""The model `kvfold-diffusion` of lm-evaluation-harness: masked diffusion with a cache of kvfold's.

Texts are written by `kvfold.diffusion.generate` through the cache asked for. A continuation's
log-likelihood is `kvfold.diffusion.likelihood`'s estimate of a lower bound, from dense forwards
whatever the cache; whether it is greedy is asked of what the model writes through the cache.

This module can be imported without lm-eval, which the extra `harness` installs; its model cannot be
made then.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from tqdm import tqdm

import kvfold
from kvfold.diffusion import DiffusionModel, Sampler, generate, load_tokenizer
from kvfold.diffusion.likelihood import estimate, is_greedy
from kvfold.diffusion.options import is_whole
from kvfold.diffusion.spec import cache_of, sampler_of
from kvfold.errors import ConfigError
from kvfold.evaluation.diffusion_orders import Order, order_batches, read_order
from kvfold.evaluation.harness_base import harness_base, require_harness
from kvfold.evaluation.writings import Writings
from kvfold.text import encode, leading_tokens

Request = tuple[tuple[str, str], list[int], list[int]]
"""The texts; tokens of the context and of what follows."""

_LOADING = ("dtype", "device", "mask_token_id", "prediction")
"""Settings that `DiffusionModel.from_pretrained` takes."""

_TEMPLATE: Any = harness_base("lm_eval.api.model", "TemplateLM")


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionSettings:
    """Of the model `kvfold-diffusion`, beside the model, the cache and the sampler."""

    length: int = 128
    """Tokens to write where the task gives none."""
    mc_num: int = 128
    """Masks that a log-likelihood is estimated from."""
    seed: int = 0
    """Of the masks, and of what is drawn at random in writing."""
    batch_size: int = 1
    """Texts that are written together, and masks that are computed together."""
    max_length: int | None = None
    """Most tokens of a context and what follows it; the model's positions without it."""

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ConfigError: Naming one that cannot be used.
        """
        for field in fields(self):
            value, least = getattr(self, field.name), 0 if field.name == "seed" else 1
            optional = field.name == "max_length" and value is None
            if not optional and not is_whole(value, least):
                raise ConfigError(
                    f"{field.name} is {value!r}: give a whole number of at least {least}"
                )


class KVFoldDiffusionLM(_TEMPLATE):
    """A masked diffusion language model that writes through a cache of kvfold's.

    Example:
        >>> import lm_eval
        >>> model = KVFoldDiffusionLM("GSAI-ML/LLaDA-8B-Instruct", cache="spa:ratio=0.25")
        >>> lm_eval.simple_evaluate(model=model, tasks=["gsm8k"], limit=10)
    """

    def __init__(
        self,
        pretrained: str = "arithmetic",
        *,
        cache: str = "spa",
        sampler: str | None = None,
        **settings: Any,
    ) -> None:
        """Load a model.

        Args:
            pretrained: As `DiffusionModel.from_pretrained` takes it.
            cache: A name with options, such as `spa:ratio=0.25:preset=paper`.
            sampler: Likewise, such as `llada:block_length=32`; the model's own without it.
            **settings: Those of `DiffusionSettings`, `dtype`, `device`, `mask_token_id`,
                `prediction`, and options of the sampler such as `steps` or `threshold`.

        Raises:
            ConfigError: lm-eval is not installed, or something given cannot be used.
        """
        require_harness(_TEMPLATE)
        super().__init__()
        own = {field.name for field in fields(DiffusionSettings)}
        given = {name: settings.pop(name) for name in own & settings.keys()}
        loading = {name: settings.pop(name) for name in _LOADING if name in settings}
        self.settings = DiffusionSettings(**given | _whole(given, "batch_size"))
        self.cache = cache_of(cache)
        self.model = DiffusionModel.from_pretrained(pretrained, **loading)
        self.sampler: Sampler = sampler_of(sampler or self.model.traits.sampler, settings)
        self.tokenizer = load_tokenizer(pretrained)
        self._name, self._device = pretrained, self.model.device
        self._generator = torch.Generator().manual_seed(self.settings.seed)
        self._writings = Writings()

    @property
    def max_length(self) -> int:
        """Most tokens of a context and what follows it."""
        positions = self.model.shape.positions
        return min(self.settings.max_length or positions, positions)

    @property
    def batch_size(self) -> int:
        """Rows side by side."""
        return self.settings.batch_size

    @property
    def tokenizer_name(self) -> str:
        """What lm-eval tells its stored requests apart by."""
        return self._name.replace("/", "__")

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        ends = sorted(self.model.traits.eos_ids)
        found = self.tokenizer.eos_token_id
        if isinstance(found, int):
            return found
        if not ends:
            raise ConfigError(f"{self._name} has no token that ends a text: give another model")
        return ends[0]

    @property
    def prefix_token_id(self) -> int:
        """The token that stands before a text without a context."""
        first = self.tokenizer.bos_token_id
        return first if isinstance(first, int) else self.eot_token_id

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Token ids, after the one that begins a text where the tokenizer puts one.

        Args:
            string: Which may begin with that token already, as chat templates write it.
            add_special_tokens: Whether to put it; by default where it is not there.
            **kwargs: What lm-eval may add; nothing is asked of it.
        """
        tokens = encode(self.tokenizer, string)
        leading = leading_tokens(self.tokenizer)
        there = add_special_tokens is None and tokens[: len(leading)] == leading
        return tokens if there or add_special_tokens is False else [*leading, *tokens]

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Messages as one text, by the tokenizer's chat template."""
        if self.tokenizer.chat_template is None:
            raise ConfigError(f"{self._name} has no chat template: leave --apply_chat_template out")
        text = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return str(text)

    def get_model_info(self) -> dict[str, object]:
        """What lm-eval writes into its results: how texts are written, and what they took."""
        return {
            "model_num_parameters": sum(each.numel() for each in self.model.decoder.parameters()),
            "model_dtype": str(self.model.dtype),
            "kvfold_version": kvfold.__version__,
            "kvfold_cache": repr(self.cache),
            "kvfold_sampler": repr(self.sampler),
            "kvfold_settings": asdict(self.settings),
            "kvfold_written": self._writings.to_dict(),
        }

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Write a text after each context, and cut it at its stop strings."""
        asked = [request.args for request in requests]
        rows = [(self.tok_encode(context), given) for context, given in asked]
        answers = [""] * len(asked)
        with tqdm(total=len(asked), disable=disable_tqdm, desc="writing") as bar:
            for places in order_batches(rows, self.batch_size):
                order = read_order(rows[places[0]][1], self.settings.length, self.sampler)
                texts = self._write([rows[place][0] for place in places], order)
                for place, text in zip(places, texts, strict=True):
                    answers[place] = text
                    self.cache_hook.add_partial("generate_until", asked[place], text)
                bar.update(len(places))
        return answers

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Estimate how likely whole texts are, in windows that know a token of what was before."""
        from lm_eval import utils  # pyright: ignore[reportMissingImports]

        answers = []
        for request in tqdm(requests, disable=disable_tqdm, desc="estimating"):
            windows = utils.get_rolling_token_windows(
                self.tok_encode(request.args[0], add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 1,
                context_len=1,
            )
            found = sum(self._estimate(*utils.make_disjoint_window(each)) for each in windows)
            answers.append(found)
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, found)
        return answers

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Estimate how likely continuations are, and whether each is what the model writes."""
        answers = []
        for texts, context, tokens in tqdm(requests, disable=disable_tqdm, desc="estimating"):
            before = self._room(context, tokens)
            greedy = is_greedy(self.model, before, tokens, self.cache)
            answer = (self._estimate(before, tokens), greedy)
            answers.append(answer)
            self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def _write(self, contexts: Sequence[list[int]], order: Order) -> list[str]:
        room = self.max_length - order.length
        if room < 1:
            raise ConfigError(
                f"{order.length} tokens are to be written, and the model's length is "
                f"{self.max_length}: give a smaller max_gen_toks"
            )
        found = generate(
            self.model,
            [(context or [self.prefix_token_id])[-room:] for context in contexts],
            self.cache,
            length=order.length,
            sampler=order.sampler,
            generator=self._generator,
        )
        self._writings.add(found.report)
        texts = self.tokenizer.batch_decode(found.tokens, skip_special_tokens=True)
        return [order.cut(text) for text in texts]

    def _room(self, context: list[int], tokens: list[int]) -> list[int]:
        """The end of a context that fits before a continuation, at least one token."""
        if not 0 < len(tokens) < self.max_length:
            raise ConfigError(
                f"a continuation of {len(tokens)} tokens cannot be scored: it needs at least one, "
                f"and at most {self.max_length - 1}; give a greater max_length or leave its task "
                "out"
            )
        return (context or [self.prefix_token_id])[len(tokens) - self.max_length :]

    def _estimate(self, context: list[int], tokens: list[int]) -> float:
        """By masks that the context alone decides, so that no other request changes them."""
        seed = random.Random(f"{self.settings.seed} {context}").getrandbits(63)
        return estimate(
            self.model,
            context,
            tokens,
            draws=self.settings.mc_num,
            rows=self.batch_size,
            generator=torch.Generator().manual_seed(seed),
        )


def _whole(given: Mapping[str, object], name: str) -> dict[str, int]:
    """A number that lm-eval's command line gives as text."""
    value = given.get(name)
    return {name: int(value)} if isinstance(value, str) and value.isdecimal() else {}

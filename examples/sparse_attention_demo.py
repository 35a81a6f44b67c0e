"""Native sparse attention on two sides, in a tiny DeepSeek-V4 on this machine's CPU.

    python examples/sparse_attention_demo.py --out picture.svg

A long text is prefilled, then tokens are decoded through sparse_attn: each layer's selector names the entries that a query
attends; of the CSA layers' some have a copy on the "device" (hot), some are fetched, some are attended by the CPU where they
lie. Four policies attend each selection, side by side. Results are held to one undivided softmax, to transformers' model on the
same weights, and to the same checkpoint served by SGLang.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from pathlib import Path

import psutil
import torch
from sparse_attention.model import Model
from sparse_attention.plot import KIB, PARTS, Decode, picture
from sparse_attention.references import Oracle, served_tokens
from sparse_attention.sides import SIDES, LayerSequence, SequenceAttention, cpu_side
from transformers import AutoTokenizer

from sglang_inplacekv.models import TINY_KINDS, checkpoint_path, long_text, make_tiny
from sglang_inplacekv.v4.selectors import make_selectors
from sparse_attn.traffic import Policy

KIND = "deepseek_v4"
FOLLOWED = "split"  # the model goes on with what this policy gives; all give the same but for rounding
# The CPU's answer is as many bytes as 16 entries, two thirds of what a query selects: as in V4-Flash.
INDEX_TOPK = 24
LAYER_TOLERANCE = 1e-5  # fp32, sums in another order
LOGIT_TOLERANCE = 1e-4  # likewise, through all layers
PREFILL_CHUNK = 512
SERVED_SHARE, SERVED_PAGE = 0.5, 256
STRIP_COLUMNS, DENSITY = 64, " .:-=+*#%@"


def say(text: str) -> None:
    print(text, flush=True)


def check(holds: bool, what: str) -> None:
    if not holds:
        sys.exit(f"error: {what}")


def arguments() -> argparse.Namespace:
    longest = TINY_KINDS[KIND]["max_position_embeddings"]
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--tokens", type=int, default=8000, help="of the text (default %(default)s)")
    parser.add_argument("--steps", type=int, default=64, help="tokens to decode (default %(default)s)")
    hot_help = "size of a layer's hot set in entries (default: a quarter of the text's)"
    parser.add_argument("--hot", type=int, help=hot_help)
    parser.add_argument("--cpu-share", type=float, default=0.5, help="of policy split (default %(default)s)")
    parser.add_argument("--no-serve", action="store_true", help="leave the served model out")
    parser.add_argument("--out", type=Path, help="where to write the picture, SVG")
    given = parser.parse_args()
    if given.tokens < PREFILL_CHUNK or given.steps < 2 or given.tokens + given.steps > longest:
        parser.error(
            f"--tokens, --steps: possible are {PREFILL_CHUNK} and 2 or more, together up to {longest}"
        )
    return given


class Demo:
    """The text, the tokens decoded after it, and each layer's record of them."""

    def __init__(self, path: Path, given: argparse.Namespace) -> None:
        text = long_text(4 * given.tokens)
        ids = AutoTokenizer.from_pretrained(path).backend_tokenizer.encode(text).ids
        self.prompt: list[int] = ids[: given.tokens]
        self.decoded: list[int] = []
        self._steps, self._share = given.steps, given.cpu_share
        self.model = Model(path)
        policies = {
            "compute": Policy.compute(),
            "fetch": Policy.fetch(),
            "split": Policy.split(given.cpu_share),
            "fewest_bytes": Policy.fewest_bytes(),
        }
        make_cpu, self.cpu_name = cpu_side()
        self.layers = []
        for selector in make_selectors(self.model, torch.float32):
            spill = [space for space in selector.spaces.values() if space.spill]
            hot = given.hot if given.hot is not None else sum(s.count(given.tokens) for s in spill) // 4
            own = policies if spill else {FOLLOWED: policies[FOLLOWED]}
            self.layers.append(LayerSequence(selector, own, hot, make_cpu))
        self.spilled = {i: layer for i, layer in enumerate(self.layers) if layer.spilled is not None}
        self.experts: dict[int, list[torch.Tensor]] = {i: [] for i in range(len(self.layers))}
        for i, layer in enumerate(self.model.layers):
            layer.mlp.gate.register_forward_hook(functools.partial(self._note_experts, i))
        self.logits: list[torch.Tensor] = []  # before each token decoded, and behind the last

    def _note_experts(self, layer: int, _, __, out) -> None:
        self.experts[layer].append(out[0])

    def run(self) -> None:
        attention, tokens = SequenceAttention(self.layers, FOLLOWED), len(self.prompt)
        begun = time.monotonic()
        for first in range(0, tokens, PREFILL_CHUNK):
            chunk = self.prompt[first : first + PREFILL_CHUNK]
            last = self.model(chunk, first, attention)
        filled = time.monotonic()
        for layer in self.layers:
            layer.begin_decode()
        self.logits.append(last)
        for step in range(self._steps):
            self.decoded.append(int(self.logits[-1].argmax()))
            self.logits.append(self.model(self.decoded[-1:], tokens + step, attention))
        done = time.monotonic()
        say(
            f"== {tokens:,} tokens of text prefilled in {filled - begun:.1f} s, {self._steps} decoded by each of "
            f"{len(self._policies)} policies in {done - filled:.1f} s; the CPU's side: {self.cpu_name}"
        )

    @property
    def _policies(self) -> list[str]:
        return list(next(iter(self.spilled.values())).composers)

    def show_selected(self) -> None:
        tokens = len(self.prompt) + self._steps
        say(
            f"== selected in decode, by place in the text; a column is {tokens / STRIP_COLUMNS:.0f} tokens. The weights are\n"
            "   random, and so looks what they select; a trained model's choice, hit rates and bytes are other ones"
        )
        for number, layer in self.spilled.items():
            space = layer.spilled
            entries = torch.cat([entries for entries, _ in layer.records[FOLLOWED].events])
            columns = (space.opens + entries * space.stride - 1) * STRIP_COLUMNS // tokens
            counts = columns.bincount(minlength=STRIP_COLUMNS)
            strip = "".join(DENSITY[c * (len(DENSITY) - 1) // int(counts.max())] for c in counts.tolist())
            say(f"   layer {number} |{strip}| 0 to {int(counts.max())} a column")

    def show_sides(self) -> None:
        say(
            f"== entries attended a step, {FOLLOWED}({self._share:g}), "
            "and the largest error against one undivided softmax in fp64"
        )
        say("   layer kind | selected = device +   hot + fetched +   cpu | hit rate |   error")
        for number, layer in enumerate(self.layers):
            record, traffic = layer.records[FOLLOWED], layer.composers[FOLLOWED].traffic
            counts = [layer.on_device, *(record.count(side) for side in SIDES)]
            means = [count / self._steps for count in counts]
            rate = f"{traffic.hit_rate:8.0%}" if layer.spilled else "        "
            say(
                f"   {number:5} {layer.selector.config.kind:4} | {sum(means):8.1f} {means[0]:8.1f} {means[1]:7.1f} "
                f"{means[2]:9.1f} {means[3]:7.1f} | {rate} | {record.error:7.1e}"
            )
        listed = [r.listed for layer in self.spilled.values() for r in layer.records.values()]
        say(
            f"   {sum(listed):,} entries selected in all layers and policies: each attended by one side, once"
        )

    def show_bytes(self) -> None:
        hot = {layer.hot_entries for layer in self.spilled.values()}
        sizes = " and ".join(map(str, hot))
        say(
            f"== KiB over the link a step, hot sets of {sizes} entries; full: all of the layer's in every step"
        )
        names = "".join(f"{part.removesuffix('_bytes'):>9}" for part in PARTS)
        say(f"   layer policy       |{names} |   total     full | of full | hit rate |   error")
        for number, layer in self.spilled.items():
            heads = layer.selector.config.heads
            for name, composer in layer.composers.items():
                traffic, record = composer.traffic, layer.records[name]
                record.check_bytes(traffic, layer.spilled, heads, torch.float32.itemsize)
                per_step = KIB * self._steps
                parts = "".join(f"{getattr(traffic, part) / per_step:9.2f}" for part in PARTS)
                say(
                    f"   {number:5} {name:12} |{parts} | {traffic.link_bytes / per_step:7.2f} "
                    f"{layer.full_bytes / per_step:8.2f} | {traffic.link_bytes / layer.full_bytes:7.1%} | "
                    f"{traffic.hit_rate:8.0%} | {record.error:7.1e}"
                )

    def compare(self, path: Path) -> None:
        """With transformers, token after token of the whole sequence."""
        entries = {
            number: torch.cat([pad(rows, INDEX_TOPK) for rows in layer.selected])
            for number, layer in self.spilled.items()
        }
        experts = {number: torch.cat(rows) for number, rows in self.experts.items()}
        oracle = Oracle(path, entries, experts)
        theirs = oracle.logits(self.prompt + self.decoded, self._steps + 1)
        ours = torch.stack(self.logits)
        largest = float((ours - theirs).abs().max())
        greedy = theirs[:-1].argmax(-1).tolist()
        say(
            f"== transformers on the same weights: largest difference of a logit {largest:.1e} (limit "
            f"{LOGIT_TOLERANCE:g}, their\n   standard deviation {float(theirs.std()):.1f}); choices of entries and "
            f"experts: {oracle.choices:,}, of them near ties that fell otherwise: {oracle.near_ties}"
        )
        check(largest <= LOGIT_TOLERANCE, "transformers' logits differ")
        check(greedy == self.decoded, f"transformers decodes {greedy}, not {self.decoded}")

    def serve(self, path: Path) -> None:
        device_tokens = len(self.prompt) // 8 // SERVED_PAGE * SERVED_PAGE
        begun = time.monotonic()
        tokens = served_tokens(path, self.prompt, self._steps, SERVED_SHARE, SERVED_PAGE, device_tokens)
        say(
            f"== sglang.Engine, --attention-backend inplacekv, share {SERVED_SHARE}, {device_tokens} tokens of the text in "
            f"GPU memory:\n   {sum(a == b for a, b in zip(tokens, self.decoded))} of {len(tokens)} tokens are transformers' "
            f"greedy ones ({time.monotonic() - begun:.0f} s)"
        )
        check(tokens == self.decoded, f"served {tokens}, not {self.decoded}")

    def check_errors(self) -> None:
        worst = max(record.error for layer in self.layers for record in layer.records.values())
        check(worst <= LAYER_TOLERANCE, f"a division differs from one softmax by {worst}")


def pad(ids: torch.Tensor, width: int) -> torch.Tensor:
    return torch.nn.functional.pad(ids, (0, width - ids.shape[1]), value=-1)


def main() -> None:
    given = arguments()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    path = make_tiny(KIND, checkpoint_path(f"tiny-{KIND}-top{INDEX_TOPK}"), index_topk=INDEX_TOPK)
    demo = Demo(path, given)
    demo.run()
    demo.show_selected()
    demo.show_sides()
    demo.show_bytes()
    demo.check_errors()
    demo.compare(path)
    if given.out is not None:
        decode = Decode(demo.spilled, FOLLOWED, len(demo.prompt), len(demo.decoded))
        given.out.write_text(picture(decode), encoding="utf-8")
        say(f"== picture: {given.out}")
    if not given.no_serve:
        demo.serve(path)
    say(f"== done in {time.time() - psutil.Process().create_time():.0f} s")


# The engine spawns processes that import this file: without the guard each of them would start an engine.
if __name__ == "__main__":
    main()

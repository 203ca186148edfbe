"""Pretrain a byte-level GPT on Python's own standard library: real text, on every machine, with long-tailed lengths.

resihp run --local --nodes 6 --gpus-per-node 2 --tp 2 --pp 2 -- python examples/pretrain_gpt.py --iterations 60
torchrun --nproc-per-node 4 examples/pretrain_gpt.py --tp 2 --pp 2        # the same, unsupervised
"""

from __future__ import annotations

import argparse
import sysconfig

import torch
from megatron.core.transformer import TransformerConfig

import resihp
from resihp.datasets import Blended, ByteFiles, MegatronIndexed, PackedDataset, PieceSource, Prefetched, RampUp

STDLIB = sysconfig.get_paths()["stdlib"]

_LLAMA = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
}
ARCHITECTURES = {
    "gpt": {},
    "llama": _LLAMA,
    "qwen": {**_LLAMA, "num_query_groups": 2, "add_qkv_bias": True},
    "qwen3": {**_LLAMA, "num_query_groups": 2, "qk_layernorm": True},
}
RECOMPUTE = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "layernorm": {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    model = parser.add_argument_group("model")
    model.add_argument("--layers", type=int, default=4)
    model.add_argument("--hidden", type=int, default=64)
    model.add_argument("--heads", type=int, default=4)
    model.add_argument(
        "--architecture",
        choices=sorted(ARCHITECTURES),
        default="gpt",
        help="gpt: LayerNorm, GELU, biases; llama: RMSNorm, SwiGLU; qwen: llama with grouped queries and QKV biases; "
        "qwen3: llama with grouped queries, and norms of queries and keys",
    )
    model.add_argument(
        "--tie-embeddings", action="store_true", help="share one weight table between embedding and head"
    )
    model.add_argument("--recompute", choices=sorted(RECOMPUTE), default="none")
    model.add_argument("--head-width", type=int, help="kv_channels; default: hidden / heads")
    model.add_argument("--window", type=int, help="attention window: number of preceding tokens; default: all")
    model.add_argument("--bf16", action="store_true", help="compute in bfloat16; the optimizer updates float32 weights")
    batch = parser.add_argument_group("data and batch")
    batch.add_argument("--corpus", default=STDLIB, help="folder of files, one document each")
    batch.add_argument(
        "--suffix",
        help="file name suffix, such as .txt; '' for all files; default: .py, with a warning if others are left out",
    )
    batch.add_argument("--indexed", help="Megatron data set (common prefix of .bin and .idx) instead of a folder")
    batch.add_argument(
        "--blend",
        nargs=2,
        action="append",
        default=[],
        metavar=("WEIGHT", "FOLDER"),
        help="mix in another folder of documents; the corpus has weight 1",
    )
    batch.add_argument("--prefetch", action="store_true", help="read the next iteration's data in a thread")
    batch.add_argument("--vocab-size", type=int, default=256)
    batch.add_argument(
        "--micro-batches", type=int, default=12, help="micro-batches in the global batch of an iteration"
    )
    batch.add_argument(
        "--rampup-batch-size",
        nargs=3,
        type=int,
        metavar=("START", "INCREMENT", "MICRO_BATCHES"),
        help="start at START micro-batches, grow by INCREMENT to --micro-batches over the first MICRO_BATCHES",
    )
    batch.add_argument("--tokens", type=int, default=256, help="token budget of a micro-batch")
    batch.add_argument("--iterations", type=int, default=30)
    batch.add_argument("--eval-interval", type=int, help="iterations between evaluations; default: no evaluation")
    batch.add_argument("--eval-iters", type=int, default=2, help="global batches per evaluation")
    batch.add_argument(
        "--eval-corpus", help="folder of documents for evaluation; default: the corpus, drawn with another seed"
    )
    batch.add_argument("--seed", type=int, default=1234)
    batch.add_argument("--lr", type=float, default=1e-3)
    batch.add_argument("--warmup", type=int, default=0)
    batch.add_argument(
        "--decay", choices=["cosine", "linear", "constant", "inverse-square-root", "WSD"], default="cosine"
    )
    batch.add_argument("--decay-iterations", type=int, default=0)
    batch.add_argument("--wsd-decay-iterations", type=int, default=0)
    alone = parser.add_argument_group("without `resihp run` only")
    alone.add_argument("--tp", type=int, default=1)
    alone.add_argument("--pp", type=int, default=1)
    alone.add_argument("--schedule", default="1f1b")
    alone.add_argument("--virtual-stages", type=int, default=1)
    alone.add_argument("--sequence-parallel", action="store_true")
    alone.add_argument("--checkpoint-every", type=int, default=0)
    alone.add_argument("--checkpoint-folder", default="checkpoints")
    alone.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    if args.suffix is None and args.corpus == STDLIB:
        args.suffix = ".py"
    return args


def source_of(args: argparse.Namespace) -> PieceSource:
    return MegatronIndexed(args.indexed) if args.indexed else ByteFiles(args.corpus, args.suffix)


def dataset_of(args: argparse.Namespace) -> resihp.Dataset:
    def packed(source: PieceSource, count: int, ramp_up: RampUp | None = None) -> PackedDataset:
        return PackedDataset(
            source, budget=args.tokens, micro_batches_per_iteration=count, seed=args.seed, ramp_up=ramp_up
        )

    ramp_up = None
    if args.rampup_batch_size:
        start, increment, over = args.rampup_batch_size
        ramp_up = RampUp(start=start, increment=increment, micro_batches=over)
    source = source_of(args)
    if not args.blend:
        return packed(source, args.micro_batches, ramp_up)
    parts = [
        (1.0, packed(source, 1)),
        *((float(weight), packed(ByteFiles(folder, args.suffix), 1)) for weight, folder in args.blend),
    ]
    return Blended(parts, micro_batches_per_iteration=args.micro_batches, ramp_up=ramp_up)


def evaluation_of(args: argparse.Namespace) -> resihp.Evaluation | None:
    if args.eval_interval is None:
        return None
    source = ByteFiles(args.eval_corpus, args.suffix) if args.eval_corpus else source_of(args)
    dataset = PackedDataset(
        source, budget=args.tokens, micro_batches_per_iteration=args.micro_batches, seed=args.seed + 1
    )
    return resihp.Evaluation(dataset, every=args.eval_interval, iterations=args.eval_iters)


def main() -> None:
    args = arguments()
    config = TransformerConfig(
        num_layers=args.layers,
        hidden_size=args.hidden,
        num_attention_heads=args.heads,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        kv_channels=args.head_width,
        window_size=None if args.window is None else (args.window, 0),
        **ARCHITECTURES[args.architecture],
        **RECOMPUTE[args.recompute],
        **({"bf16": True, "params_dtype": torch.bfloat16} if args.bf16 else {}),
    )
    trainer = resihp.Trainer(
        config,
        vocab_size=args.vocab_size,
        dataset=Prefetched(dataset_of(args)) if args.prefetch else dataset_of(args),
        optimizer=resihp.AdamW(
            lr=args.lr,
            warmup=args.warmup,
            decay=args.decay,
            decay_iterations=args.decay_iterations,
            wsd_decay_iterations=args.wsd_decay_iterations,
        ),
        sequence=args.tokens,
        evaluation=evaluation_of(args),
        seed=args.seed,
        share_embeddings_and_output_weights=args.tie_embeddings,
        tp=args.tp,
        pp=args.pp,
        schedule=args.schedule,
        virtual_stages=args.virtual_stages,
        sequence_parallel=args.sequence_parallel,
        checkpoint_every=args.checkpoint_every,
        checkpoint_folder=args.checkpoint_folder,
        resume=args.resume,
    )
    trainer.train(iterations=args.iterations)


if __name__ == "__main__":
    main()

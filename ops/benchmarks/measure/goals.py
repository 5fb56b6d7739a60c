"""Goals: the ratio of our tokens per second to another engine's, by workload, in float32.

Some goals are for quantised floors. A floor is a library's best linear layers alone: MKL, fbgemm in
8 bits, torch in 4 bits. There is no goal against our own kernels, because it would rise with every
kernel that becomes faster.
"""

GOALS = {
    ("decode", "transformers"): 4.5,
    ("decode", "vllm"): 1.6,
    ("decode", "floor mkl"): 0.85,
    ("decode", "floor fbgemm"): 0.65,
    ("mixed", "transformers"): 8.0,
    ("mixed", "vllm"): 2.0,
    ("mixed", "floor mkl"): 0.75,
    ("prefix", "vllm"): 1.8,
    ("prefill", "vllm"): 1.05,
    ("prefill", "floor mkl"): 0.9,
    ("single", "transformers"): 2.0,
    ("single", "vllm"): 2.0,
    ("single", "floor mkl"): 0.9,
    ("single", "floor fbgemm"): 0.9,
    ("single", "floor torch4"): 0.7,
    ("decode", "tokenmill"): 0.95,
    ("mixed", "tokenmill"): 0.95,
}

# Rounded weights against our own float32 weights, by quantization, workload and other engine.
ROUNDED_GOALS = {
    ("int8", "decode", "unquantised"): 1.7,
    ("int8", "mixed", "unquantised"): 1.7,
    ("int4", "single", "wide"): 2.5,
}

# Goals of `ops/bench gpu`: prefix of the results' names, the measured key, and its target.
GPU_GOALS = {
    "default: decode": ("share_of_floor", 0.85),
    "default: prefill": ("share_of_floor", 0.65),
    "mixed": ("times_transformers", 3.0),
}

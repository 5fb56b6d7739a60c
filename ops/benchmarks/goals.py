"""What we set ourselves: our tokens per second over another's, by workload, in float32 (and per quantised floor).

A floor is the best linear layers of a library, alone: MKL's, fbgemm's in 8 bits, torch's in 4. Beside our own kernels'
there is no goal: it would rise with every kernel that becomes faster.
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

# With rounded weights, beside ourselves without: by quantization, workload and other.
ROUNDED_GOALS = {
    ("int8", "decode", "unquantised"): 1.7,
    ("int8", "mixed", "unquantised"): 1.7,
    ("int4", "single", "wide"): 2.5,
}

# Of `ops/bench gpu`: the results whose names begin so, what counts in them, and how much of it.
GPU_GOALS = {
    "default: decode": ("share_of_bandwidth", 0.80),
    "mixed": ("times_transformers", 3.0),
}

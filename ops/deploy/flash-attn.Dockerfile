# Adds FlashAttention 4 to the image for GPUs, from wheels alone. Its kernels are compiled when they are first needed.
# From the repository's root, after each `docker compose --profile gpu build`:
#   docker build -f ops/deploy/flash-attn.Dockerfile -t tokenmill:local-gpu .
# PIP_INDEX_URL and PIP_EXTRA_INDEX_URL name another index than pip's own. `cu13` is the CUDA that torch was built for.
ARG IMAGE=tokenmill:local-gpu

FROM $IMAGE
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
USER root
COPY ops/constraints.txt /tmp/
RUN pip install --no-cache-dir --only-binary :all: -c /tmp/constraints.txt "flash-attn-4[cu13]==4.0.0b36" \
  && rm /tmp/constraints.txt
USER tokenmill

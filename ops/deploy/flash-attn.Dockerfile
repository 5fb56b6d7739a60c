# Adds flash-attn to the image for GPUs. No index has its wheel, so CUDA's compiler builds it, once per version; a later
# call finds it in Docker's cache. From the repository's root, after each `docker compose --profile gpu build`:
#   docker build -f ops/deploy/flash-attn.Dockerfile -t tokenmill:local-gpu .
# CUDA_IMAGE must have the CUDA version that torch was built for (`torch.version.cuda`). PIP_INDEX_URL and
# PIP_EXTRA_INDEX_URL name another index than pip's own.
ARG CUDA_IMAGE=nvidia/cuda:13.0.1-devel-ubuntu24.04
ARG IMAGE=tokenmill:local-gpu

FROM $CUDA_IMAGE AS wheel
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
RUN apt-get update && apt-get install -y --no-install-recommends python3.12-dev python3.12-venv \
  && python3.12 -m venv /opt/build
ENV PATH=/opt/build/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY ops/constraints.txt .
RUN pip install -c constraints.txt torch setuptools wheel packaging ninja
ARG FLASH_ATTN_VERSION=2.8.3.post2
RUN pip wheel --no-deps --no-build-isolation -w /wheels "flash-attn==$FLASH_ATTN_VERSION"

FROM $IMAGE
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
USER root
COPY --from=wheel /wheels /wheels
COPY ops/constraints.txt /wheels/
RUN pip install --no-cache-dir -c /wheels/constraints.txt /wheels/*.whl && rm -r /wheels
USER tokenmill

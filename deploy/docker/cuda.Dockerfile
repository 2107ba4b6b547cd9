# Image for NVIDIA GPUs: training with flash-attn, and SGLang for rollout in an environment of its own, /opt/sglang.
#
#   docker build -f deploy/docker/cuda.Dockerfile -t areal-like:cuda .
#   docker run --rm --init --gpus all --shm-size 64g -v "$PWD/runs:/job/runs" \
#     areal-like:cuda train gsm8k_1.7b_1gpu rollout.engine.python=/opt/sglang/bin/python
#
# Never built and never run here: there was no GPU and no registry. Checked: hadolint, and that every file that is
# copied is in the checkout. Not checked: that the base image's tag exists, that flash-attn builds, that SGLang starts.
#
# The compiler's CUDA must have the major version of torch's (`python -c "import torch; print(torch.version.cuda)"`).
# The image keeps the compiler, because SGLang compiles some kernels when they are first used.
ARG CUDA_IMAGE=nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04

# hadolint ignore=DL3006
FROM ${CUDA_IMAGE} AS base
ENV DEBIAN_FRONTEND=noninteractive PIP_DISABLE_PIP_VERSION_CHECK=1
# Ubuntu 24.04 has Python 3.12. libnuma1: SGLang. wget: health checks of KubeRay. bubblewrap: the sandbox of code rewards.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
       bubblewrap build-essential git libnuma1 ninja-build python3 python3-dev python3-venv tini wget \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/areal-like && python3 -m venv /opt/sglang
ENV PATH=/opt/areal-like/bin:$PATH

FROM base AS train
WORKDIR /src
COPY requirements.lock requirements-ray.lock ./
RUN pip install --no-cache-dir torch==2.13.0 \
    && pip install --no-cache-dir -r requirements.lock \
    && pip install --no-cache-dir -r requirements-ray.lock
# Compiled here: there may be no wheel of flash-attn for this torch. 90 is an H100, 80 an A100, 100 a B200.
ARG FLASH_ATTN_VERSION=2.8.3.post2
ARG FLASH_ATTN_CUDA_ARCHS=90
ARG MAX_JOBS=8
ARG EINOPS_VERSION=0.8.2
# hadolint ignore=DL3013
RUN pip install --no-cache-dir setuptools wheel packaging psutil \
    && FLASH_ATTN_CUDA_ARCHS="$FLASH_ATTN_CUDA_ARCHS" MAX_JOBS="$MAX_JOBS" \
       pip install --no-cache-dir --no-build-isolation --no-deps "flash-attn==$FLASH_ATTN_VERSION" \
    && pip install --no-cache-dir "einops==$EINOPS_VERSION"
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels . \
    && pip install --no-cache-dir --no-deps --no-index /wheels/areal_like-*.whl

FROM base AS sglang
RUN /opt/sglang/bin/pip install --no-cache-dir sglang==0.5.23

FROM base
COPY --from=train /opt/areal-like /opt/areal-like
COPY --from=sglang /opt/sglang /opt/sglang
# Number 1000 belongs to a user of the base image.
ARG UID=1001
RUN useradd --uid "$UID" --create-home areal && mkdir --parents /job/runs && chown -R areal /job
USER ${UID}
WORKDIR /job
ENTRYPOINT ["tini", "--", "areal-like"]
CMD ["--help"]

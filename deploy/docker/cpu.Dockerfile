# Image without a GPU: the quickstart, `areal-like score`, controllers and reward services.
#
#   docker build -f deploy/docker/cpu.Dockerfile -t areal-like:cpu .
#   docker run --rm --init --shm-size 2g -v "$PWD/runs:/job/runs" areal-like:cpu train quickstart
#
# Never built and never run here. Checked: hadolint, and that every file that is copied is in the checkout.
# Pinned packages of requirements.lock exist as wheels for this Python; the suite has run on 3.11.

FROM python:3.11-slim-bookworm AS wheel
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim-bookworm
# bubblewrap: the sandbox of code rewards. tini: passes signals on and ends orphans.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap tini \
    && rm -rf /var/lib/apt/lists/*
COPY requirements.lock /tmp/requirements.lock
RUN pip install --no-cache-dir torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu \
    && pip install --no-cache-dir -r /tmp/requirements.lock
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-deps --no-index /wheels/areal_like-*.whl
# The user's number is the owner of what a run writes to a mounted folder: --build-arg UID="$(id -u)"
ARG UID=1000
RUN useradd --uid "$UID" --create-home areal && mkdir --parents /job/runs && chown -R areal /job
USER ${UID}
WORKDIR /job
ENTRYPOINT ["tini", "--", "areal-like"]
CMD ["--help"]

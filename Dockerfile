# One image for every gpuscale program; docker-compose.yml and deploy/kubernetes choose which one runs.
#
#   docker build -t gpuscale:local .
#   docker run --init gpuscale:local gpuscale-agent --help
#
# --build-arg PYTHON=NAME takes another base: a mirror's copy, a digest, or the whole name where an engine asks for it.
ARG PYTHON=python:3.12-slim

FROM ${PYTHON} AS build
# Settles what builds the wheel, too.
ENV PIP_CONSTRAINT=/src/constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY pyproject.toml README.md constraints.txt ./
COPY protos protos
COPY services services
# Without a pip of its own: nothing is installed into what runs.
RUN python -m venv --without-pip /opt/gpuscale \
    && pip --python /opt/gpuscale/bin/python install '.[agent,server,cli,dashboard,postgresql,container,kubernetes]'

FROM ${PYTHON}
LABEL org.opencontainers.image.title=gpuscale \
      org.opencontainers.image.description="GPUs seen, reserved, and given to workers by the depth of their queue"
# Never root: the data volume belongs to the user the programs run as.
RUN useradd --uid 10001 --create-home gpuscale && install -d -o gpuscale -g gpuscale -m 0700 /var/lib/gpuscale
COPY --from=build /opt/gpuscale /opt/gpuscale
ENV PATH=/opt/gpuscale/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# By number, so that Kubernetes can tell that it is not root (runAsNonRoot).
USER 10001:10001
WORKDIR /home/gpuscale
VOLUME /var/lib/gpuscale
# Every program ends within 10 s of SIGTERM, also as the first process of its container.
STOPSIGNAL SIGTERM
CMD ["gpuscalectl", "--help"]

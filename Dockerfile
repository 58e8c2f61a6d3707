# One image for every gpuscale program; docker-compose.yml and deploy/kubernetes choose which one runs.
#
#   docker build -t gpuscale:local .
#   docker run --init gpuscale:local gpuscale-agent --help
#
# --build-arg PYTHON=NAME takes another base: a mirror's copy, a digest, or the whole name where an engine asks for it.
ARG PYTHON=python:3.12.11-slim

FROM ${PYTHON} AS build
# Settles what builds the wheel, too.
ENV PIP_CONSTRAINT=/src/constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY tools/third_party_notices.py tools/third_party_notices.py
COPY protos protos
COPY services services
COPY addons/kubernetes addons/kubernetes
# Without a pip of its own: nothing is installed into what runs.
RUN python -m venv --without-pip /opt/gpuscale \
    && pip --python /opt/gpuscale/bin/python install '.[agent,server,cli,dashboard,postgresql,container]' ./addons/kubernetes
# From the metadata of what was installed. Debian's own packages keep theirs below /usr/share/doc.
RUN install -d /opt/gpuscale/share/licenses && cp LICENSE /opt/gpuscale/share/licenses/ \
    && /opt/gpuscale/bin/python tools/third_party_notices.py > /opt/gpuscale/share/licenses/THIRD-PARTY-NOTICES

FROM ${PYTHON}
LABEL org.opencontainers.image.title=gpuscale \
      org.opencontainers.image.licenses=Apache-2.0 \
      org.opencontainers.image.description="GPUs seen, reserved, and given to workers by the depth of their queue"
# Never root: the data volume belongs to the user the programs run as.
# gpuscale-worker is for an adapter that runs workers in its own container: they are no user of any service.
RUN useradd --uid 10001 --create-home gpuscale && install -d -o gpuscale -g gpuscale -m 0700 /var/lib/gpuscale \
    && useradd --uid 10002 --create-home gpuscale-worker \
    && install -d -o gpuscale-worker -g gpuscale-worker -m 0700 /var/lib/gpuscale-worker
COPY --from=build /opt/gpuscale /opt/gpuscale
ENV PATH=/opt/gpuscale/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# By number, so that Kubernetes can tell that it is not root (runAsNonRoot).
USER 10001:10001
WORKDIR /home/gpuscale
VOLUME /var/lib/gpuscale
# Every program ends within 10 s of SIGTERM, also as the first process of its container.
STOPSIGNAL SIGTERM
CMD ["gpuscalectl", "--help"]

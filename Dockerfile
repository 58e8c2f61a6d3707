# One image for every gpuscale program; docker-compose.yml chooses which one runs.
FROM python:3.12-slim AS build
WORKDIR /src
COPY pyproject.toml README.md constraints.txt ./
COPY protos protos
COPY services services
RUN python -m venv /opt/gpuscale \
    && /opt/gpuscale/bin/pip install --no-cache-dir -c constraints.txt '.[agent,server,cli,dashboard,postgresql,kubernetes]'

FROM python:3.12-slim
COPY --from=build /opt/gpuscale /opt/gpuscale
# Never root: the data volume belongs to the user the programs run as.
RUN useradd --uid 10001 --create-home gpuscale && install -d -o gpuscale -m 0700 /var/lib/gpuscale
ENV PATH=/opt/gpuscale/bin:$PATH PYTHONUNBUFFERED=1
USER gpuscale
VOLUME /var/lib/gpuscale
CMD ["gpuscalectl", "--help"]

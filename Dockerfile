# One image for every role: `podium serve CONFIG` starts the conductor, which starts the rest.
#
#   docker build -t podium .
#   docker run --rm -p 8000:8000 -v ./my.yaml:/etc/podium/podium.yaml podium
#
# For GPUs, build with --build-arg CONSTRAINTS=/dev/null (PyPI's torch brings CUDA) and run with
# --gpus all.
FROM python:3.11-slim-bookworm AS build

ARG CONSTRAINTS=constraints-cpu.txt
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python -m venv /opt/podium
COPY pyproject.toml constraints-cpu.txt README.md LICENSE ./
COPY protocol protocol
COPY conductor conductor
COPY worker worker
RUN /opt/podium/bin/pip install -c "$CONSTRAINTS" ".[gateway]"

FROM python:3.11-slim-bookworm

RUN useradd --system --uid 10001 --home-dir /run/podium podium \
 && mkdir -p /run/podium /etc/podium && chown podium /run/podium
COPY --from=build /opt/podium /opt/podium
ENV PATH=/opt/podium/bin:$PATH XDG_RUNTIME_DIR=/run/podium
USER podium
EXPOSE 8000
STOPSIGNAL SIGTERM
ENTRYPOINT ["podium"]
CMD ["serve", "/etc/podium/podium.yaml"]

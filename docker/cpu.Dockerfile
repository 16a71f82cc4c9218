# megatune on CPUs.
#   docker build -f docker/cpu.Dockerfile -t megatune:cpu .
#   docker run --rm -it -v "$PWD:/runs" megatune:cpu train run.yaml
FROM python:3.12-slim-bookworm

# The build without CUDA is not on the package index.
ARG TORCH=2.13.0
RUN pip install --no-cache-dir "torch==${TORCH}" --index-url https://download.pytorch.org/whl/cpu

WORKDIR /megatune
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir -c constraints.txt .

WORKDIR /runs
ENTRYPOINT ["megatune"]

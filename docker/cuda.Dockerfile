# megatune on NVIDIA GPUs. The machine needs a driver and NVIDIA's container toolkit; torch brings CUDA's libraries.
#   docker build -f docker/cuda.Dockerfile -t megatune:cuda .
#   docker run --rm -it --gpus all --ipc host --ulimit memlock=-1 -v "$PWD:/runs" megatune:cuda train run.yaml
#
# The whole image, not the slim one: torch.compile asks for a C compiler.
FROM python:3.12-bookworm

ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

WORKDIR /megatune
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir -c constraints.txt .

WORKDIR /runs
ENTRYPOINT ["megatune"]

# Images of distrib. Both targets run distrib, torch and sshd under a user that is not root; scripts/image has the shared steps.
#
#   docker build --target cpu --build-arg PIP_EXTRA_INDEX_URL=URL -t distrib:cpu .   hosts without GPUs, and demonstrations
#   docker build -t distrib:cuda .   the default: a worker with CUDA, NCCL and UCX over InfiniBand
ARG CPU_BASE=ubuntu:24.04
ARG CUDA_BASE=nvidia/cuda:13.0.1-cudnn-runtime-ubuntu24.04

FROM ${CPU_BASE} AS cpu
# URL: PyTorch's index of builds for CPUs (see pytorch.org, "Get Started"), whose versions sort before those with CUDA.
# Without it, torch brings its CUDA libraries. Mirrors: --build-arg PIP_INDEX_URL=URL, or PIP_FIND_LINKS.
ARG PIP_EXTRA_INDEX_URL
ARG PIP_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_NO_INDEX
COPY scripts/image /src/scripts/image
RUN /src/scripts/image system
ENV VIRTUAL_ENV=/opt/distrib PATH=/opt/distrib/bin:$PATH
COPY . /src
RUN /src/scripts/image python
USER 2000
WORKDIR /home/trainer
EXPOSE 2222
CMD ["/usr/sbin/sshd", "-D", "-e", "-f", "/home/trainer/sshd/config"]

# CUDA is that of torch's package, so that a host whose driver is too old for it is refused at the start.
FROM ${CUDA_BASE} AS cuda
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_NO_INDEX
COPY scripts/image /src/scripts/image
RUN /src/scripts/image system libibverbs1 ibverbs-providers librdmacm1
ENV VIRTUAL_ENV=/opt/distrib PATH=/opt/distrib/bin:$PATH
COPY . /src
RUN /src/scripts/image python
# What the NVIDIA container runtime brings into the container: all GPUs, and the driver's libraries for CUDA and NVML.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
LABEL com.nvidia.volumes.needed=nvidia_driver
USER 2000
WORKDIR /home/trainer
EXPOSE 2222
CMD ["/usr/sbin/sshd", "-D", "-e", "-f", "/home/trainer/sshd/config"]

# A worker image: distrib, CUDA-enabled torch, sshd for Open MPI's launcher, what NCCL and UCX need for InfiniBand, and a
# user that is not root. Its CUDA is that of torch's package, so that a host whose driver is too old for it is refused at the start.
FROM nvidia/cuda:13.0.1-cudnn-runtime-ubuntu24.04

RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
       openssh-server openssh-client python3 python3-venv rsync libibverbs1 ibverbs-providers librdmacm1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 2000 --user-group --create-home --shell /bin/bash trainer \
    && mkdir -p /run/sshd

ENV VIRTUAL_ENV=/opt/distrib PATH=/opt/distrib/bin:$PATH
RUN python3 -m venv /opt/distrib
COPY pyproject.toml constraints.txt README.md LICENSE /src/
COPY distrib /src/distrib
COPY launch /src/launch
RUN pip install --no-cache-dir -c /src/constraints.txt '/src[examples,plot]' && rm -rf /src
COPY --chown=trainer examples /home/trainer/examples
COPY --chown=trainer hostfiles /home/trainer/hostfiles

# What the NVIDIA container runtime brings into the container: all GPUs, and the driver's libraries for CUDA and NVML.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
LABEL com.nvidia.volumes.needed=nvidia_driver

# sshd without root, on a port of its own. The job's key pair (id_rsa, id_rsa.pub, authorized_keys) is mounted over
# ~/.ssh; it is the hosts' key as well, so that nobody without it is taken for one of them, and none is in the image.
# A login over ssh does not see the image's variables: the driver, where clouds mount it, is named once more.
RUN printf '%s\n' 'Host *' '  Port 2222' '  User trainer' '  IdentityFile /home/trainer/.ssh/id_rsa' \
       '  StrictHostKeyChecking yes' '  UserKnownHostsFile /dev/null' \
       '  KnownHostsCommand /usr/bin/sed "s/^/* /" /home/trainer/.ssh/id_rsa.pub' > /etc/ssh/ssh_config.d/distrib.conf
USER 2000
WORKDIR /home/trainer
RUN mkdir -m 700 .ssh sshd \
    && printf '%s\n' 'Port 2222' 'HostKey /home/trainer/.ssh/id_rsa' \
       'AuthorizedKeysFile /home/trainer/.ssh/authorized_keys' 'AllowUsers trainer' 'PidFile none' 'UsePAM no' \
       'PasswordAuthentication no' 'KbdInteractiveAuthentication no' 'StrictModes no' 'MaxStartups 200' \
       'AllowTcpForwarding no' \
       'SetEnv PATH=/opt/distrib/bin:/usr/local/nvidia/bin:/usr/local/cuda/bin:/usr/local/bin:/usr/bin:/bin LD_LIBRARY_PATH=/usr/local/nvidia/lib:/usr/local/nvidia/lib64' > sshd/config
EXPOSE 2222
CMD ["/usr/sbin/sshd", "-D", "-e", "-f", "/home/trainer/sshd/config"]

# A worker image: distrib, CUDA-enabled torch, sshd for Open MPI's launcher, and a user that is not root.
FROM nvidia/cuda:12.8.1-cudnn-runtime-ubuntu24.04

RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
       openssh-server openssh-client python3 python3-venv rsync \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --shell /bin/bash trainer \
    && mkdir -p /run/sshd

ENV VIRTUAL_ENV=/opt/distrib PATH=/opt/distrib/bin:$PATH
RUN python3 -m venv /opt/distrib
COPY pyproject.toml constraints.txt README.md LICENSE /src/
COPY distrib /src/distrib
COPY launch /src/launch
RUN pip install --no-cache-dir -c /src/constraints.txt '/src[examples]' && rm -rf /src
COPY --chown=trainer examples /home/trainer/examples
COPY --chown=trainer hostfiles /home/trainer/hostfiles

# sshd without root: keys and port of the user's own; mount the job's key pair over ~/.ssh.
USER trainer
WORKDIR /home/trainer
RUN mkdir -m 700 .ssh sshd && ssh-keygen -q -t ed25519 -N '' -f sshd/host_key \
    && printf '%s\n' 'Port 2222' 'HostKey /home/trainer/sshd/host_key' 'PidFile none' 'UsePAM no' \
       'PasswordAuthentication no' 'StrictModes no' > sshd/config \
    && printf '%s\n' 'Host *' '  Port 2222' '  StrictHostKeyChecking accept-new' > .ssh/config
EXPOSE 2222
CMD ["/usr/sbin/sshd", "-D", "-e", "-f", "/home/trainer/sshd/config"]

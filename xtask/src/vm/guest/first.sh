#!/bin/bash
# First process of the machine: file systems as a distribution mounts them, then the job that the host gave.
echo '@@ booted'
busybox=/sbin/busybox
$busybox mount -t proc proc /proc
$busybox mount -t devtmpfs dev /dev
$busybox mount -t sysfs sys /sys
$busybox mount -t tmpfs tmpfs /run
$busybox mkdir -p /run/disk
$busybox mount -o bind / /run/disk
$busybox mount -t tmpfs tmpfs /tmp
# The tests are at the path that they have on the host, which may be in /tmp.
for folder in /run/disk/tmp/*/; do
    if [ -d "$folder" ]; then
        folder=$($busybox basename "$folder")
        $busybox mkdir "/tmp/$folder"
        $busybox mount -o bind "/run/disk/tmp/$folder" "/tmp/$folder"
    fi
done
$busybox mkdir -p /dev/pts /dev/shm /run/applets
$busybox --install -s /run/applets
# Applets come last: a real program of the same name is preferred.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/run/applets HOME=/root TERM="${TERM:-vt100}"
mount -t devpts devpts /dev/pts
mount -t tmpfs shm /dev/shm
mount -t bpf bpf /sys/fs/bpf
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t ext4 -o ro /dev/vdb /lib/modules
ln -sfn /proc/self/fd /dev/fd
# Drivers of all devices, as udev would load them.
find /sys/devices -name modalias -exec cat {} + | sort -u | xargs /sbin/modprobe --all --quiet --use-blacklist
# As kmod's static nodes are made: the module is loaded when it is opened.
mkdir -p /dev/net
mknod /dev/net/tun c 10 200
hostname vm
ip link set lo up
# As distributions have it, for programs that hold many maps and links.
ulimit -n 524288
. /job
poweroff -f

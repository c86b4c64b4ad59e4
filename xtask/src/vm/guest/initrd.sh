#!/bin/busybox sh
# /init of the initial RAM disk: modules for the disk, the root file system, then its own first process.
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t devtmpfs dev /dev
while read -r module; do
    /bin/busybox insmod "/modules/$module" || echo "insmod $module failed"
done </modules/order
# A disk is there some milliseconds after its driver.
tries=0
until /bin/busybox mount -t ext4 /dev/vda /root 2>/dev/null; do
    tries=$((tries + 1))
    if [ "$tries" -gt 100 ]; then
        echo "the root disk cannot be mounted"
        /bin/busybox poweroff -f
    fi
    /bin/busybox sleep 0.1
done
/bin/busybox cp /job /root/job
# For the root file system, too, which has few programs of its own.
/bin/busybox cp /bin/busybox /root/sbin/busybox
exec /bin/busybox switch_root /root /sbin/first

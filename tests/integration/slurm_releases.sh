#!/usr/bin/env bash
# Unpacks another release of Slurm beside the installed one, for test clusters (slurm_releases.py); run by
# `make setup-system`, as root, on Debian. Nothing of the system is replaced.
#
#   slurm_releases.sh FOLDER RELEASE SUITE        24.11 is trixie's, 26.05 was sid's in November 2026
#
# The packages come from this machine's own archive, of another suite. Programs get the loader and the libraries that
# were unpacked with them (DT_RPATH, which plugins inherit); processes of jobs stay this machine's.
set -euo pipefail
folder=$1 release=$2 suite=$3
to=$folder/slurm-$release
[ -x "$to/bin/slurmctld" ] && exit 0
work=$(mktemp -d)
trap 'rm -rf "$work" "$to.new"' EXIT
chmod 755 "$work"
mkdir -p "$work"/{etc/apt/preferences.d,lists/partial,cache/archives/partial} "$to.new/bin"
touch "$work/status"
archive=$(awk '/^URIs:/ {print $2; exit}' /etc/apt/sources.list.d/*.sources 2>/dev/null || true)
[ -n "$archive" ] || archive=$(awk '$1 == "deb" {print ($2 ~ /^\[/) ? $3 : $2; exit}' /etc/apt/sources.list)
keys=$(ls /usr/share/keyrings/debian-archive-keyring.* | head -n 1)
echo "deb [signed-by=$keys] $archive $suite main" >"$work/etc/apt/sources.list"
apt=(apt-get -qq -o Dir::Etc="$work/etc/apt" -o Dir::State::lists="$work/lists" -o Dir::Cache="$work/cache"
  -o Dir::State::status="$work/status" -o APT::Sandbox::User=root)
"${apt[@]}" update
"${apt[@]}" install --download-only -y --no-install-recommends slurmctld slurmd slurmdbd slurm-client munge >/dev/null
for package in "$work"/cache/archives/*.deb; do dpkg-deb -x "$package" "$to.new"; done
libraries=$(dirname "$(ls -d "$to.new"/usr/lib/*/slurm-wlm)")
libraries=$to${libraries#"$to.new"}
loader=$(cd "$to.new" && ls usr/lib/*/ld-linux-*.so.* usr/lib64/ld-linux-*.so.* 2>/dev/null | head -n 1)
for program in "$to.new"/usr/sbin/slurm*-wlm "$to.new"/usr/sbin/slurmdbd \
  "$to.new"/usr/bin/{sacct,sacctmgr,salloc,sattach,sbatch,sbcast,scancel,scontrol,sdiag,sinfo,sprio,squeue,sreport,srun,sshare,sstat,strigger}; do
  [ -f "$program" ] || continue
  name=$(basename "$program")
  name=${name%-wlm}
  cp "$program" "$to.new/bin/$name"
  patchelf --set-interpreter "$to/$loader" --force-rpath --set-rpath "$libraries:$libraries/slurm-wlm" "$to.new/bin/$name"
done
rm -rf "$to"
mv "$to.new" "$to"
found=$("$to/bin/slurmd" -V)
case $found in
  *" $release."*) echo "$to: $found" >&2 ;;
  *) echo "$to: $suite has $found now, not $release" >&2; rm -rf "$to"; exit 1 ;;
esac

#!/bin/sh
# Import an image of the PostgreSQL that is installed on this machine, for an engine that cannot pull one. The argument
# is the name of the image. Like the public image, it has a user `postgres`, who needs no password, and a database of
# that name.
set -eu
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
for home in /usr/lib/postgresql/*; do :; done # the newest version
version=${home##*/}

copy() { (cd / && tar --create --dereference --hard-dereference --exclude='llvmjit*' "$@") | tar --extract --directory "$tree"; }
libraries() { ldd "$@" 2>/dev/null | sed -nE 's/.*[[:space:]](\/[^ ]+) \(.*/\1/p' | sort -u; }

# shellcheck disable=SC2046
copy bin/sh usr/share/zoneinfo "usr/share/postgresql/$version" "${home#/}/lib" \
    $(cd / && ls "${home#/}"/bin/postgres "${home#/}"/bin/initdb "${home#/}"/bin/pg_isready) \
    $(libraries /bin/sh "$home"/bin/postgres "$home"/bin/initdb "$home"/bin/pg_isready "$home"/lib/dict_*.so | sed 's/^.//')
mkdir -p "$tree/etc" "$tree/tmp" "$tree/var/run/postgresql" "$tree/data"
echo 'postgres:x:999:999::/data:/bin/sh' >"$tree/etc/passwd"
cat >"$tree/start" <<'START'
#!/bin/sh
set -e
[ "$1" != postgres ] || shift
[ -s "$PGDATA/PG_VERSION" ] || {
    initdb --auth=trust --username=postgres --encoding=UTF8 --locale=C --no-sync
    echo 'host all all all trust' >>"$PGDATA/pg_hba.conf"
}
exec postgres -c listen_addresses='*' "$@"
START
chmod 755 "$tree/start"
tar --create --directory "$tree" --owner=999 --group=999 . | docker import \
    --change 'ENTRYPOINT ["/start"]' --change 'CMD ["postgres"]' --change 'USER 999' --change 'EXPOSE 5432' \
    --change "ENV PATH=$home/bin:/bin PGDATA=/data/db" - "$1" >/dev/null

#!/bin/sh
# Make sure that a ZooKeeper and Curator's recipes can be started: a java, the jars, and a binding for their log, all
# from the distribution's packages. Prints the class path. No service is started.
set -eu
. "$(dirname "$0")/install.sh"

jars=/usr/share/java
# Debian's ZooKeeper names the jars it needs, except some that its Netty connections (TLS) need.
classpath=$jars/zookeeper.jar:$jars/slf4j-simple.jar:$jars/netty-codec.jar:$jars/netty-resolver.jar

missing() {
    echo "The tests need ZooKeeper: java, and in $jars the jars of ZooKeeper, slf4j and Curator's recipes (Debian:" >&2
    echo "apt-get install default-jre-headless zookeeper libslf4j-java libcurator-recipes-java)" >&2
    exit 1
}
present() {
    command -v java >/dev/null 2>&1 && [ -e "$jars/zookeeper.jar" ] && [ -e "$jars/slf4j-simple.jar" ] &&
        [ -e "$jars/curator-recipes.jar" ]
}

if ! present; then
    java=
    command -v java >/dev/null 2>&1 || java=default-jre-headless
    # shellcheck disable=SC2086
    install_packages $java zookeeper libslf4j-java libcurator-recipes-java || missing
    present || missing
fi
printf '%s\n' "$classpath"

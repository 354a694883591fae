#!/bin/sh
# Certificates for an aggregator and its workers, from an authority of your own. Needs openssl.
#
#     sh aggregator-certificates.sh FOLDER HOST...
#
# HOST...: the addresses and names by which workers reach the aggregator. FOLDER then holds
#     ca.pem                           for everybody (--tls-ca, tls_ca)
#     aggregator.pem, aggregator.key   for the aggregator (--tls-cert, --tls-key)
#     worker.pem, worker.key           for the workers (tls_cert, tls_key)
#     ca.key                           for nobody: keep it elsewhere. With it in FOLDER, the next call makes new
#                                      certificates of the same authority
set -eu
if [ $# -lt 2 ]; then
    echo "usage: sh aggregator-certificates.sh FOLDER HOST..." >&2
    exit 2
fi
umask 077
folder=$1
shift
mkdir -p "$folder"
cd "$folder"

names=
for host; do
    case $host in
    *:*) kind=IP ;;
    *[!0-9.]*) kind=DNS ;;
    *) kind=IP ;;
    esac
    names="$names,$kind:$host"
done

new="-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"

if [ ! -f ca.key ]; then
    # shellcheck disable=SC2086 # several words
    openssl req -x509 $new -days 3650 -subj "/CN=dynamix authority" -keyout ca.key -out ca.pem \
        -addext keyUsage=critical,keyCertSign,cRLSign
fi

certify() { # NAME USAGE MORE
    printf 'extendedKeyUsage=%s\nkeyUsage=critical,digitalSignature\n%s\n' "$2" "$3" >"$1.ext"
    # shellcheck disable=SC2086
    openssl req $new -subj "/CN=dynamix $1" -keyout "$1.key" -out "$1.csr"
    openssl x509 -req -in "$1.csr" -CA ca.pem -CAkey ca.key -CAcreateserial -days 825 -extfile "$1.ext" -out "$1.pem"
    rm "$1.csr" "$1.ext"
}

certify aggregator serverAuth "subjectAltName=${names#,}"
certify worker clientAuth ""

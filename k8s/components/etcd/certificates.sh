#!/usr/bin/env bash
# Prints the three Secrets that etcd and its clients need, signed by a new authority whose key is thrown away.
#   k8s/components/etcd/certificates.sh | kubectl apply -f -
# Run it again before DAYS (825) are over, and restart the members one by one. In a cluster with cert-manager, let it
# make Secrets of the same names and keys instead.
set -euo pipefail

days=${DAYS:-825}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"

new_key() {
  openssl ecparam -name prime256v1 -genkey -noout -out "$1.key" 2>/dev/null
}

# secret NAME COMMON_NAME USAGES NAMES
secret() {
  local name=$1 common_name=$2 usages=$3 names=$4
  new_key "$name"
  openssl req -new -key "$name.key" -subj "/CN=$common_name" -out "$name.csr" 2>/dev/null
  {
    echo "basicConstraints=critical,CA:FALSE"
    echo "keyUsage=critical,digitalSignature"
    echo "extendedKeyUsage=$usages"
    if [[ -n $names ]]; then echo "subjectAltName=$names"; fi
  } >"$name.ext"
  openssl x509 -req -in "$name.csr" -CA ca.crt -CAkey ca.key -CAcreateserial -days "$days" -sha256 \
    -extfile "$name.ext" -out "$name.crt" 2>/dev/null
  cat <<SECRET
---
apiVersion: v1
kind: Secret
metadata:
  name: $name
  labels:
    app.kubernetes.io/name: etcd
    app.kubernetes.io/instance: hieravg
    app.kubernetes.io/component: rendezvous
    app.kubernetes.io/part-of: hieravg
type: kubernetes.io/tls
data:
  ca.crt: $(base64 -w0 ca.crt)
  tls.crt: $(base64 -w0 "$name.crt")
  tls.key: $(base64 -w0 "$name.key")
SECRET
}

new_key ca
openssl req -x509 -new -key ca.key -subj "/CN=hieravg-etcd" -days "$days" -sha256 -out ca.crt \
  -addext "keyUsage=critical,keyCertSign,cRLSign" 2>/dev/null

# In the same namespace, pods call the members hieravg-etcd-0.hieravg-etcd; etcd looks up the longer names too.
service=hieravg-etcd
names="DNS:*.$service,DNS:*.$service.${NAMESPACE:-default}.svc,DNS:*.$service.${NAMESPACE:-default}.svc.cluster.local"
names="$names,DNS:localhost,IP:127.0.0.1"
# A member is a client of the others, and of itself through its gateway.
secret hieravg-etcd-server hieravg-etcd-server serverAuth,clientAuth "$names"
secret hieravg-etcd-peer hieravg-etcd-peer serverAuth,clientAuth "$names"
secret hieravg-etcd-client hieravg clientAuth ""

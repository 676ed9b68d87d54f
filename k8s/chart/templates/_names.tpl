{{/* Names, labels, ports and addresses: what objects must agree on. */}}

{{- define "pagewire.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* At most 36 characters, so that worker-of-<fullname>-core-<index> and a revision's hash fit into 63. A name that is cut
     gets a hash of the whole one: two long releases of one namespace must not meet. */}}
{{- define "pagewire.fullname" -}}
{{- $name := .Values.fullnameOverride -}}
{{- if not $name -}}
{{- $chart := default .Chart.Name .Values.nameOverride -}}
{{- $name = ternary .Release.Name (printf "%s-%s" .Release.Name $chart) (contains $chart .Release.Name) -}}
{{- end -}}
{{- if gt (len $name) 36 -}}
{{- printf "%s-%s" ($name | trunc 28 | trimSuffix "-") (sha256sum $name | trunc 7) -}}
{{- else -}}
{{- $name | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* The only labels in selectors. They never change over upgrades, and the release's name is in them. */}}
{{- define "pagewire.selectorLabels" -}}
app.kubernetes.io/name: {{ include "pagewire.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* Labels of objects: the user's never replace those above. */}}
{{- define "pagewire.labels" -}}
{{- $own := include "pagewire.selectorLabels" . | fromYaml -}}
{{- $_ := set $own "app.kubernetes.io/version" .root.Chart.AppVersion -}}
{{- $_ := set $own "app.kubernetes.io/managed-by" .root.Release.Service -}}
{{- $_ := set $own "app.kubernetes.io/part-of" "pagewire" -}}
{{- $_ := set $own "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-") -}}
{{- toYaml (merge $own (default (dict) .labels) .root.Values.commonLabels) -}}
{{- end -}}

{{/* metadata of an object: root, component, name; labels and annotations that are its own. */}}
{{- define "pagewire.metadata" -}}
name: {{ .name }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "pagewire.labels" . | nindent 2 }}
{{- with merge (dict) (default (dict) .annotations) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "pagewire.port" -}}
{{- get (dict "frontend" "50051" "core" "50052" "worker" "50053") . -}}
{{- end -}}

{{- define "pagewire.healthPort" -}}
{{- get (dict "frontend" "50061" "core" "50062" "worker" "50063") . -}}
{{- end -}}

{{- define "pagewire.metricsPort" -}}
{{- get (dict "frontend" "9101" "core" "9102" "worker" "9103") . -}}
{{- end -}}

{{/* <fullname>-<component> */}}
{{- define "pagewire.componentName" -}}
{{- printf "%s-%s" (include "pagewire.fullname" .root) .component -}}
{{- end -}}

{{/* The StatefulSet of workers. A core knows its own pod's name and nothing of indices, and no image has a shell to cut one
     out: so the name of a core's worker is the core's with something before it, which $(POD_NAME) can express. The label
     apps.kubernetes.io/pod-index would do the same, but exists from 1.28 only. */}}
{{- define "pagewire.workerStatefulSet" -}}
{{- printf "worker-of-%s-core" (include "pagewire.fullname" .) -}}
{{- end -}}

{{- define "pagewire.leaderWorkerSet" -}}
{{- printf "%s-group" (include "pagewire.fullname" .) -}}
{{- end -}}

{{/* <service>.<namespace>.svc.<domain>, given root and service. */}}
{{- define "pagewire.serviceDomain" -}}
{{- printf "%s.%s.svc.%s" .service .root.Release.Namespace .root.Values.clusterDomain -}}
{{- end -}}

{{- define "pagewire.coreDomain" -}}
{{- $service := ternary (include "pagewire.leaderWorkerSet" .) (printf "%s-core" (include "pagewire.fullname" .)) .Values.groups.leaderWorkerSet.enabled -}}
{{- include "pagewire.serviceDomain" (dict "root" . "service" $service) -}}
{{- end -}}

{{/* What the frontends are given: all cores. */}}
{{- define "pagewire.coreAddresses" -}}
{{- $port := include "pagewire.port" "core" -}}
{{- if eq .Values.frontend.coreDiscovery "dns" -}}
{{- $service := printf "%s-core" (include "pagewire.fullname" .) -}}
dns:///{{ include "pagewire.serviceDomain" (dict "root" . "service" $service) }}:{{ $port }}
{{- else -}}
{{- $pod := ternary (include "pagewire.leaderWorkerSet" .) (printf "%s-core" (include "pagewire.fullname" .)) .Values.groups.leaderWorkerSet.enabled -}}
{{- $addresses := list -}}
{{- range $index := until (int .Values.groups.replicas) -}}
{{- $addresses = append $addresses (printf "%s-%d.%s:%s" $pod $index (include "pagewire.coreDomain" $) $port) -}}
{{- end -}}
{{- join "," $addresses -}}
{{- end -}}
{{- end -}}

{{/* What a core is given: its own worker, by way of its own pod's name. */}}
{{- define "pagewire.workerAddress" -}}
{{- $port := include "pagewire.port" "worker" -}}
{{- if .Values.groups.leaderWorkerSet.enabled -}}
$(POD_NAME)-1.{{ include "pagewire.coreDomain" . }}:{{ $port }}
{{- else -}}
{{- $service := printf "%s-worker" (include "pagewire.fullname" .) -}}
worker-of-$(POD_NAME).{{ include "pagewire.serviceDomain" (dict "root" . "service" $service) }}:{{ $port }}
{{- end -}}
{{- end -}}

{{- define "pagewire.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "pagewire.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "pagewire.image" -}}
{{- $image := .image -}}
{{- $path := $image.repository -}}
{{- with .root.Values.imageRegistry -}}
{{- $path = printf "%s/%s" (trimSuffix "/" .) $path -}}
{{- end -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $path $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $path (default .root.Chart.AppVersion $image.tag) -}}
{{- end -}}
{{- end -}}

{{- define "pagewire.cacheClaim" -}}
{{- if .Values.model.cache.existingClaim -}}
{{- .Values.model.cache.existingClaim -}}
{{- else if .Values.model.cache.create -}}
{{- printf "%s-models" (include "pagewire.fullname" .) -}}
{{- end -}}
{{- end -}}

{{/* Secret of a component's TLS files; component client is the pod of helm test. */}}
{{- define "pagewire.tlsSecret" -}}
{{- $own := get .root.Values.tls.secrets .component -}}
{{- if .root.Values.tls.certManager.enabled -}}
{{- printf "%s-%s-tls" (include "pagewire.fullname" .root) .component -}}
{{- else -}}
{{- required (printf "tls.enabled needs tls.existingSecret, tls.secrets.%s or tls.certManager.enabled" .component) (default .root.Values.tls.existingSecret $own) -}}
{{- end -}}
{{- end -}}

{{/* Numbers come out of YAML as floats, and a large one would print as 1e+06. */}}
{{- define "pagewire.number" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) -}}{{ int64 . }}{{- else -}}{{ . }}{{- end -}}
{{- end -}}

{{/* "true" or nothing: whether a kind is known to the cluster. */}}
{{- define "pagewire.knows" -}}
{{- if .root.Capabilities.APIVersions.Has .kind -}}true{{- end -}}
{{- end -}}

{{/* What the cluster has to know for an autoscaler. */}}
{{- define "pagewire.autoscalerKind" -}}
{{- ternary "keda.sh/v1alpha1/ScaledObject" "external.metrics.k8s.io/v1beta1" (eq .kind "keda") -}}
{{- end -}}

{{/* "true" or nothing: whether replicas are left to an autoscaler that this cluster has. */}}
{{- define "pagewire.isAutoscaled" -}}
{{- if .autoscaling.enabled -}}
{{- include "pagewire.knows" (dict "root" .root "kind" (include "pagewire.autoscalerKind" .autoscaling)) -}}
{{- end -}}
{{- end -}}

{{/* What a manifest says of replicas: the value, or, where an autoscaler decides, the number that is there, if the cluster can
     be asked: an upgrade that left it out would set it back to 1. Given autoscaling, replicas, and the workload's
     apiVersion, kind and name. */}}
{{- define "pagewire.replicas" -}}
{{- if not (include "pagewire.isAutoscaled" .) -}}
replicas: {{ int .replicas }}
{{- else -}}
{{- with lookup .apiVersion .kind .root.Release.Namespace .name -}}
replicas: {{ int .spec.replicas }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Least number of pods of a tier, for budgets. */}}
{{- define "pagewire.minReplicas" -}}
{{- if include "pagewire.isAutoscaled" . -}}{{ int .autoscaling.minReplicas }}{{- else -}}{{ int .replicas }}{{- end -}}
{{- end -}}

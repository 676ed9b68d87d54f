{{/* Objects that several tiers have. Given root, component and tier. */}}

{{/* With name, why, and publishNotReady. The label pagewire.io/headless keeps the Service for clients out of the ServiceMonitor. */}}
{{- define "pagewire.headlessService" -}}
# {{ .why }}
apiVersion: v1
kind: Service
metadata:
  {{- include "pagewire.metadata" (merge (dict "labels" (dict "pagewire.io/headless" "true")) .) | nindent 2 }}
spec:
  clusterIP: None
  publishNotReadyAddresses: {{ .publishNotReady }}
  selector:
    {{- include "pagewire.selectorLabels" . | nindent 4 }}
  ports:
    - {name: grpc, port: {{ include "pagewire.port" .component }}, targetPort: grpc, protocol: TCP}
    {{- if .root.Values.metrics.enabled }}
    - {name: metrics, port: {{ include "pagewire.metricsPort" .component }}, targetPort: metrics, protocol: TCP}
    {{- end }}
{{- end -}}

{{- define "pagewire.settingsConfigMap" -}}
apiVersion: v1
kind: ConfigMap
metadata:
  {{- include "pagewire.metadata" (merge (dict "name" (include "pagewire.componentName" .)) .) | nindent 2 }}
data:
  {{- include "pagewire.settings" . | trim | nindent 2 }}
{{- end -}}

{{/* With name, serviceName and scaling (autoscaling, replicas). Parallel: groups do not wait for each other. */}}
{{- define "pagewire.statefulSet" -}}
apiVersion: apps/v1
kind: StatefulSet
metadata:
  {{- include "pagewire.metadata" . | nindent 2 }}
spec:
  {{- with include "pagewire.replicas" (merge (dict "apiVersion" "apps/v1" "kind" "StatefulSet" "name" .name) .scaling) }}
  {{- . | nindent 2 }}
  {{- end }}
  serviceName: {{ .serviceName }}
  podManagementPolicy: Parallel
  selector:
    matchLabels:
      {{- include "pagewire.selectorLabels" . | nindent 6 }}
  updateStrategy:
    {{- toYaml .tier.updateStrategy | nindent 4 }}
  template:
    {{- include "pagewire.podTemplate" . | nindent 4 }}
{{- end -}}

{{/* With autoscaling and replicas. One pod would have to be let go anyway, and a budget for it only blocks nodes that drain. */}}
{{- define "pagewire.pdb" -}}
{{- if and .tier.pdb.enabled (gt (include "pagewire.minReplicas" . | int) 1) -}}
---
apiVersion: policy/{{ ternary "v1" "v1beta1" (semverCompare ">=1.21-0" .root.Capabilities.KubeVersion.Version) }}
kind: PodDisruptionBudget
metadata:
  {{- include "pagewire.metadata" (merge (dict "name" (include "pagewire.componentName" .)) .) | nindent 2 }}
spec:
  maxUnavailable: {{ .tier.pdb.maxUnavailable }}
  {{- if semverCompare ">=1.27-0" .root.Capabilities.KubeVersion.Version }}
  # A pod that never gets ready must not keep its node.
  unhealthyPodEvictionPolicy: AlwaysAllow
  {{- end }}
  selector:
    matchLabels:
      {{- include "pagewire.selectorLabels" . | nindent 6 }}
{{- end -}}
{{- end -}}

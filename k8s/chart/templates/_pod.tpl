{{/* The pods of the three tiers. Every template here is given root, component and tier (the component's values). */}}

{{/* Seconds that a worker waits for a core that has work on it. */}}
{{- define "pagewire.drainSeconds" -}}
{{- $drain := .tier.drainSeconds -}}
{{- if kindIs "invalid" $drain -}}
{{- $drain = add .root.Values.core.lameDuckSeconds .root.Values.core.drainSeconds 10 -}}
{{- end -}}
{{- int $drain -}}
{{- end -}}

{{- define "pagewire.gracePeriodSeconds" -}}
{{- add .tier.preStopSleepSeconds .tier.lameDuckSeconds (include "pagewire.drainSeconds" . | int) .root.Values.terminationMarginSeconds -}}
{{- end -}}

{{- define "pagewire.podTemplate" -}}
metadata:
  labels:
    {{- include "pagewire.podLabels" . | nindent 4 }}
  {{- with include "pagewire.podAnnotations" . }}
  annotations:
    {{- . | nindent 4 }}
  {{- end }}
spec:
  {{- include "pagewire.podSpec" . | nindent 2 }}
{{- end -}}

{{/* Without the chart's version: a new chart that changes nothing in a pod must not restart it. */}}
{{- define "pagewire.podLabels" -}}
{{- $own := merge (include "pagewire.selectorLabels" . | fromYaml) (dict "app.kubernetes.io/part-of" "pagewire") -}}
{{- toYaml (merge $own .tier.podLabels .root.Values.commonLabels) -}}
{{- end -}}

{{/* What this chart renders and a pod reads only when it starts is in a checksum: a change rolls the pods. */}}
{{- define "pagewire.podAnnotations" -}}
{{- $own := dict -}}
{{- if .tier.settings -}}
{{- $_ := set $own "checksum/settings" (include "pagewire.settings" . | sha256sum) -}}
{{- end -}}
{{- if and .root.Values.tls.enabled .root.Values.tls.certManager.enabled -}}
{{- $_ := set $own "checksum/certificate" (include "pagewire.certificateSpec" . | sha256sum) -}}
{{- end -}}
{{- with merge $own .tier.podAnnotations .root.Values.commonAnnotations -}}
{{- toYaml . -}}
{{- end -}}
{{- end -}}

{{/* Settings as variables of the component, the data of its ConfigMap. */}}
{{- define "pagewire.settings" -}}
{{- range $name, $value := .tier.settings }}
PAGEWIRE_{{ upper $.component }}_{{ upper $name }}: {{ include "pagewire.number" $value | quote }}
{{- end -}}
{{- end -}}

{{- define "pagewire.podSpec" -}}
{{- $values := .root.Values -}}
serviceAccountName: {{ include "pagewire.serviceAccount" .root }}
automountServiceAccountToken: false
# Kubernetes would put PAGEWIRE_FRONTEND_PORT=tcp://... into every pod for a Service of that name, and the frontend would
# take it for its --port.
enableServiceLinks: false
terminationGracePeriodSeconds: {{ include "pagewire.gracePeriodSeconds" . }}
{{- with $values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with mergeOverwrite (deepCopy $values.podSecurityContext) .tier.podSecurityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tier.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .tier.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .tier.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tier.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tier.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tier.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range . }}
  {{- $spread := . }}
  {{- if not (hasKey $spread "labelSelector") }}
  {{- $spread = merge (dict "labelSelector" (dict "matchLabels" (include "pagewire.selectorLabels" $ | fromYaml))) . }}
  {{- end }}
  - {{- toYaml $spread | nindent 4 }}
  {{- end }}
{{- end }}
{{- with .tier.extraInitContainers }}
initContainers:
  {{- toYaml . | nindent 2 }}
{{- end }}
containers:
  - name: {{ .component }}
    {{- include "pagewire.container" . | nindent 4 }}
  {{- with .tier.extraContainers }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
volumes:
  {{- include "pagewire.volumes" . | nindent 2 }}
{{- end -}}

{{- define "pagewire.container" -}}
{{- $values := .root.Values -}}
image: {{ include "pagewire.image" (dict "root" .root "image" .tier.image) | quote }}
imagePullPolicy: {{ .tier.image.pullPolicy }}
{{- with mergeOverwrite (deepCopy $values.securityContext) .tier.securityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
# No command: the image's entrypoint is the service, under an init that passes signals on from the first moment.
args:
  {{- include "pagewire.args" . | nindent 2 }}
env:
  {{- include "pagewire.env" . | nindent 2 }}
{{- if or .tier.settings .tier.extraEnvFrom }}
envFrom:
  {{- if .tier.settings }}
  - configMapRef:
      name: {{ include "pagewire.componentName" . }}
  {{- end }}
  {{- with .tier.extraEnvFrom }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
ports:
  - {name: grpc, containerPort: {{ include "pagewire.port" .component }}, protocol: TCP}
  - {name: health, containerPort: {{ include "pagewire.healthPort" .component }}, protocol: TCP}
  {{- if $values.metrics.enabled }}
  - {name: metrics, containerPort: {{ include "pagewire.metricsPort" .component }}, protocol: TCP}
  {{- end }}
{{ include "pagewire.probes" . }}
{{- with .tier.preStopSleepSeconds }}
lifecycle:
  preStop:
    sleep:
      seconds: {{ . }}
{{- end }}
resources:
  {{- toYaml .tier.resources | nindent 2 }}
volumeMounts:
  {{- include "pagewire.volumeMounts" . | nindent 2 }}
{{- end -}}

{{/* Startup and liveness ask whether the process should be restarted, readiness whether a request can be served. A frontend
     without a core and a worker without a model are alive, so both start by their liveness; a core is there to have the
     model loaded, and starts by its readiness, in more time than it gives itself (--startup-timeout-s, after which it ends
     and says why). Before 1.24 there are no gRPC probes: the health port answers TCP from the start. */}}
{{- define "pagewire.probes" -}}
{{- $seconds := add .root.Values.model.loadSeconds 60 -}}
{{- if ne .component "core" -}}
{{- $seconds = .tier.probes.startup.seconds -}}
{{- end -}}
{{- $startup := dict "periodSeconds" .tier.probes.startup.periodSeconds "timeoutSeconds" .tier.probes.startup.timeoutSeconds -}}
{{- $_ := set $startup "failureThreshold" (int (ceil (divf $seconds .tier.probes.startup.periodSeconds))) -}}
{{- $port := include "pagewire.healthPort" .component -}}
{{- $service := ternary "readiness" "liveness" (eq .component "core") -}}
startupProbe: {{- include "pagewire.probe" (dict "root" .root "port" $port "service" $service "probe" $startup) | nindent 2 }}
readinessProbe: {{- include "pagewire.probe" (dict "root" .root "port" $port "service" "readiness" "probe" .tier.probes.readiness) | nindent 2 }}
livenessProbe: {{- include "pagewire.probe" (dict "root" .root "port" $port "service" "liveness" "probe" .tier.probes.liveness) | nindent 2 }}
{{- end -}}

{{- define "pagewire.probe" -}}
{{- if semverCompare ">=1.24-0" .root.Capabilities.KubeVersion.Version -}}
grpc: {port: {{ .port }}, service: {{ .service }}}
{{- else -}}
tcpSocket: {port: {{ .port }}}
{{- end }}
{{- range $key, $value := .probe }}
{{ $key }}: {{ int $value }}
{{- end }}
{{- end -}}

{{- define "pagewire.volumeMounts" -}}
- {name: tmp, mountPath: /tmp}
{{- if .root.Values.tls.enabled }}
- {name: tls, mountPath: /etc/pagewire/tls, readOnly: true}
{{- end }}
{{- if and (eq .component "frontend") .tier.apiKeys.existingSecret }}
- {name: api-keys, mountPath: /etc/pagewire/api-keys, readOnly: true}
{{- end }}
{{- if eq .component "worker" }}
- name: models
  mountPath: /var/cache/pagewire/models
  {{- with .root.Values.model.cache.subPath }}
  subPath: {{ . }}
  {{- end }}
  {{- if .root.Values.model.cache.readOnly }}
  readOnly: true
  {{- end }}
- name: {{ ternary "models" "kernels" .tier.keepKernels }}
  mountPath: /var/cache/pagewire/kernels
  {{- if .tier.keepKernels }}
  subPath: {{ list .root.Values.model.cache.subPath "kernels" | compact | join "/" }}
  {{- end }}
{{- if .tier.shmSize }}
- {name: shm, mountPath: /dev/shm}
{{- end }}
{{- end }}
{{- with .tier.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "pagewire.volumes" -}}
- name: tmp
  emptyDir: {}
{{- if .root.Values.tls.enabled }}
- name: tls
  secret:
    secretName: {{ include "pagewire.tlsSecret" . }}
    defaultMode: 0440
{{- end }}
{{- if and (eq .component "frontend") .tier.apiKeys.existingSecret }}
- name: api-keys
  secret:
    secretName: {{ .tier.apiKeys.existingSecret }}
    defaultMode: 0440
    items: [{key: {{ .tier.apiKeys.key }}, path: api-keys}]
{{- end }}
{{- if eq .component "worker" }}
- name: models
  {{- if include "pagewire.cacheClaim" .root }}
  persistentVolumeClaim:
    claimName: {{ include "pagewire.cacheClaim" .root }}
    {{- if .root.Values.model.cache.readOnly }}
    readOnly: true
    {{- end }}
  {{- else }}
  emptyDir: {sizeLimit: {{ .root.Values.model.cache.size }}}
  {{- end }}
{{- if not .tier.keepKernels }}
- name: kernels
  emptyDir: {}
{{- end }}
{{- with .tier.shmSize }}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ . }}}
{{- end }}
{{- end }}
{{- with .tier.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

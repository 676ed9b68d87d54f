{{/* What the schema can't say: values that exclude or need each other. Included once, so that a release fails as a whole. */}}

{{- define "pagewire.validate" -}}
{{- $values := .Values -}}
{{- $cache := $values.model.cache -}}
{{- $groups := dict "root" . "autoscaling" $values.groups.autoscaling "replicas" $values.groups.replicas -}}
{{- $mostGroups := int $values.groups.replicas -}}
{{- if include "pagewire.isAutoscaled" $groups -}}{{- $mostGroups = int $values.groups.autoscaling.maxReplicas -}}{{- end -}}
{{- range $name, $autoscaling := dict "groups" $values.groups.autoscaling "frontend" $values.frontend.autoscaling -}}
{{- if gt (int $autoscaling.minReplicas) (int $autoscaling.maxReplicas) -}}
{{- fail (printf "%s.autoscaling.minReplicas=%v is above maxReplicas=%v" $name $autoscaling.minReplicas $autoscaling.maxReplicas) -}}
{{- end -}}
{{- end -}}
{{- if and $cache.create (not $cache.existingClaim) (gt $mostGroups 1) (not (has "ReadWriteMany" $cache.accessModes)) -}}
{{- fail (printf "model.cache.create makes one claim for all workers: %d groups need model.cache.accessModes=[ReadWriteMany]" $mostGroups) -}}
{{- end -}}
{{- if and $cache.readOnly (not $cache.existingClaim) -}}
{{- fail "model.cache.readOnly needs model.cache.existingClaim: a new volume is empty" -}}
{{- end -}}
{{- if and $cache.readOnly $values.worker.keepKernels -}}
{{- fail "worker.keepKernels writes to the model's volume, and model.cache.readOnly forbids it" -}}
{{- end -}}
{{- if and (include "pagewire.isAutoscaled" $groups) (eq $values.frontend.coreDiscovery "list") -}}
{{- fail "groups.autoscaling needs frontend.coreDiscovery=dns: a list of cores is fixed until the next rollout" -}}
{{- end -}}
{{- if and $values.metrics.serviceMonitor.enabled $values.metrics.podMonitor.enabled -}}
{{- fail "metrics.serviceMonitor and metrics.podMonitor would count everything twice: enable one" -}}
{{- end -}}
{{- if and (or $values.metrics.serviceMonitor.enabled $values.metrics.podMonitor.enabled) (not $values.metrics.enabled) -}}
{{- fail "metrics.serviceMonitor and metrics.podMonitor need metrics.enabled" -}}
{{- end -}}
{{- if and $values.tls.certManager.enabled (not $values.tls.certManager.issuerRef.name) -}}
{{- fail "tls.certManager.enabled needs tls.certManager.issuerRef.name" -}}
{{- end -}}
{{- if and $values.tls.enabled $values.tls.certManager.enabled (not (.Capabilities.APIVersions.Has "cert-manager.io/v1/Certificate")) -}}
{{- fail "tls.certManager.enabled: this cluster does not know cert-manager.io/v1 Certificate, and without it no pod could start; install cert-manager, or name secrets in tls.existingSecret (helm template: --api-versions cert-manager.io/v1/Certificate)" -}}
{{- end -}}
{{- if and $values.groups.leaderWorkerSet.enabled (not (.Capabilities.APIVersions.Has "leaderworkerset.x-k8s.io/v1/LeaderWorkerSet")) -}}
{{- fail "groups.leaderWorkerSet.enabled: this cluster does not know leaderworkerset.x-k8s.io/v1 LeaderWorkerSet; install its controller, or use StatefulSets (helm template: --api-versions leaderworkerset.x-k8s.io/v1/LeaderWorkerSet)" -}}
{{- end -}}
{{- if and $values.frontend.ingress.enabled (not $values.frontend.ingress.host) -}}
{{- fail "frontend.ingress.enabled needs frontend.ingress.host" -}}
{{- end -}}
{{- if and $values.frontend.grpcRoute.enabled (not $values.frontend.grpcRoute.parentRefs) -}}
{{- fail "frontend.grpcRoute.enabled needs frontend.grpcRoute.parentRefs" -}}
{{- end -}}
{{- range $component := list "frontend" "core" "worker" -}}
{{- $tier := get $values $component -}}
{{- if and $tier.preStopSleepSeconds (semverCompare "<1.30-0" $.Capabilities.KubeVersion.Version) -}}
{{- fail (printf "%s.preStopSleepSeconds needs Kubernetes 1.30, and this is %s: use %s.lameDuckSeconds" $component $.Capabilities.KubeVersion.Version $component) -}}
{{- end -}}
{{- end -}}
{{- end -}}

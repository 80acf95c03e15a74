// RUN: secc opt %s -p 'fuse-blocks{when="always"}' | filecheck %s
// RUN: secc opt %s -p 'fuse-blocks{when="always" without="rms-norm"}' | filecheck %s --check-prefix WITHOUT
// RUN: secc opt %s -p 'fuse-blocks{cluster="1x8xH100"}' | filecheck %s --check-prefix GPU
// RUN: secc opt %s -p 'fuse-blocks{cluster="local:2"}' | filecheck %s --check-prefix CPU
// RUN: secc opt %s -p 'fuse-blocks{when="often"}' 2>&1 | filecheck %s --check-prefix BAD

// Rewrites are kept where their rules are on and the devices run Triton. A call costs what was measured with all of its block's rewrites, and
// a block that cannot run with them keeps none.

// CHECK: fusions = ["swiglu; MLP: lm.mlp; model.py:9; ", "rms-norm; Norm: lm.norm and 1 more; model.py:3; ", "rms-norm; Other: odd.norm; ; odd cannot be run with it"]
// WITHOUT: fusions = ["swiglu; MLP: lm.mlp; model.py:9; ", "rms-norm; Norm: lm.norm and 1 more; model.py:3; the rule rms-norm is off", "rms-norm; Other: odd.norm; ; the rule rms-norm is off"]
// GPU: fusions = ["swiglu; MLP: lm.mlp; model.py:9; ", "rms-norm
// CPU: fusions = ["fuse-blocks; all modules; ; on CPUs the operators take longer than the ops that they replace; --fuse puts them in", "swiglu; MLP: lm.mlp; model.py:9; on CPUs
// BAD: unknown value 'often' for option when
// BAD: expected auto, always, never
sec.graph "g" {
  sec.symbol "B" kind "rows" key "x" dim 0
  sec.block "lm" class "LM" params 10 trainable 10
  sec.block "odd" class "Odd" params 10 trainable 10
  // CHECK: sec.rewrite "mlp"
  // CHECK-NEXT: sec.rewrite "norm"
  // CHECK-NEXT: sec.case
  // WITHOUT: sec.rewrite "mlp"
  // WITHOUT-NEXT: sec.case
  // CPU-NOT: sec.rewrite
  sec.rewrite "mlp" rules ["swiglu"] class "MLP" method "forward" modules ["lm.mlp"] code ["9 def mlp(self, x):", "9     return x"] at "model.py:9"
  sec.rewrite "norm" rules ["rms-norm"] class "Norm" method "forward" modules ["lm.norm", "lm.last"] code ["3 def norm(self, x):", "4     return x"] at "model.py:3"
  sec.rewrite "other" rules ["rms-norm"] class "Other" method "forward" modules ["odd.norm"] code ["3 def other(self, x):", "4     return x"]
  sec.case "all" when [] {
    %x = sec.input "x" : !sec.tensor<[B, 8], f32>
    // CHECK: sec.call "lm" {{.*}} {cost = "counted", flops = "8*B", ops = 3 : i64, saved = "16*B"}
    // WITHOUT: sec.call "lm" {{.*}} {cost = "counted", flops = "8*B", ops = 9 : i64, saved = "32*B"}
    // GPU: sec.call "lm" {{.*}} {cost = "counted", flops = "8*B", ops = 3 : i64, saved = "16*B"}
    // CPU: sec.call "lm" {{.*}} {cost = "counted", flops = "8*B", ops = 9 : i64, saved = "32*B"}
    %f = sec.call "lm" (%x) args "$0" outs [""] {cost = "counted", flops = "8*B", ops = 9 : i64, saved = "32*B", fused_cost = "counted", fused_flops = "8*B", fused_ops = 3 : i64, fused_saved = "16*B"} : !sec.tensor<[B, 8], f32, grad>
    // CHECK: sec.call "odd" {{.*}} {cost = "counted", flops = "8*B"}
    %a = sec.call "odd" (%f) args "$0" outs [""] {cost = "counted", flops = "8*B", fused_cost = "default", fused_flops = "20*B"} : !sec.tensor<[B, 8], f32, grad>
    %loss = sec.glue "aten.sum.default" (%a) args "$0" : !sec.tensor<[], f32, grad>
    sec.return (%loss)
  }
}

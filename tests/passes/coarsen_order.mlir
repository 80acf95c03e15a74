// RUN: secc opt %s -p coarsen,sink-boundaries | filecheck %s

// The rows of both inputs stand one behind the other. The teacher's are sent in halves, [2, B, 8]; the student's, which go nowhere, stay as
// they are.

sec.graph "views" widths "own" {
  sec.symbol "B" kind "rows" key "a" dim 0
  sec.pattern when [] share "1" {B = 1}
  sec.block "teacher" class "T" params 900 trainable 0 component "teacher" layers 2 when []
  sec.block "student" class "S" params 900 trainable 900 component "student" layers 2 when []
  // CHECK: sec.case
  sec.case "always" when [] {
    %a = sec.input "a" : !sec.tensor<[B, 8], f32>
    %b = sec.input "b" : !sec.tensor<[B, 8], f32>
    %x = sec.glue "aten.cat.default" (%a, %b) args "[$0, $1]" : !sec.tensor<["2*B", 8], f32>
    // CHECK: [[T:%.*]] = sec.call "teacher"
    // CHECK-NEXT: [[H:%.*]] = sec.glue "aten.reshape.default" ([[T]]) args "$0, [2, B, 8]" no_grad in @teacher : !sec.tensor<[2, B, 8], f32>
    // CHECK-NEXT: [[R:%.*]] = sec.glue "aten.reshape.default" ([[H]]) args "$0, [2*B, 8]" no_grad in @student : !sec.tensor<["2*B", 8], f32>
    %t = sec.call "teacher" (%x) args "$0" outs [""] no_grad {mode = "forward"} : !sec.tensor<["2*B", 8], f32>
    // CHECK-NEXT: [[S:%.*]] = sec.call "student"
    %s = sec.call "student" (%x) args "$0" outs [""] {mode = "train"} : !sec.tensor<["2*B", 8], f32, grad>
    // CHECK-NEXT: sec.glue "aten.sub.Tensor" ([[S]], [[R]])
    %d = sec.glue "aten.sub.Tensor" (%s, %t) args "$0, $1" : !sec.tensor<["2*B", 8], f32, grad>
    %l = sec.glue "aten.sum.default" (%d) args "$0" : !sec.tensor<[], f32, grad>
    sec.term "loss" (%l)
    sec.return constant "0.0"
  }
}
